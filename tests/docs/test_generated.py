"""`make docs` would change nothing: each generated page is what its source gives now."""

import picture
from click.testing import CliRunner
from doc_pages import algorithms_markdown, commands_markdown, facts_markdown, reference_markdown
from import_graph import import_graph, modules

from benchmarks import page
from libra.cli.main import cli
from libra.config import RunConfig, config_from_dict
from libra.config.field_help import field_references
from libra.observe.endpoints import METRICS
from libra.observe.timeline.states import STATES


def test_the_generated_pages_are_up_to_date(repository):
    docs = repository / "docs"
    architecture = (docs / "architecture.md").read_text()
    made = {
        docs / "configuration.md": reference_markdown(),
        docs / "algorithms.md": algorithms_markdown(),
        docs / "cli.md": commands_markdown(),
        docs / "facts.md": facts_markdown(),
        docs / "benchmarks.md": page.page(),
        docs / "architecture.md": picture.with_generated(architecture, import_graph(modules(repository))),
        repository / "docker" / "dask.yaml": CliRunner().invoke(cli, ["doctor", "--settings"]).output,
    }
    old = [path.name for path, text in made.items() if path.read_text() != text]
    assert not old, f"{', '.join(old)}: type make docs"


def test_every_setting_is_explained_and_its_default_can_be_typed_as_it_is_shown():
    fields = field_references().values()
    assert not [field.name for field in fields if len(field.description) < 16]
    assert config_from_dict({}, [f"{field.name}={field.default}" for field in fields]) == RunConfig()


def test_the_page_about_metrics_names_each_metric_and_state(repository):
    page = (repository / "docs" / "observe.md").read_text()
    assert not [name for name in (*STATES, *(metric.name for metric in METRICS)) if name not in page]
