"""The command line: ``libra run``, ``plan``, ``doctor``, ...; `libra.cli.main` lists them."""
