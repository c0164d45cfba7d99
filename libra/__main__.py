"""``python -m libra``: the ``libra`` command."""

from libra.cli.main import main

main()
