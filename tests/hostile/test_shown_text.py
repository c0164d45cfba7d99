"""What is shown of hostile text, in a terminal, a log or the page, acts on nothing, and is ready in linear time."""

import io
import json
import logging
import unicodedata
from html.parser import HTMLParser

import pytest
from hypothesis import given
from rich.console import Console

from hostile_input import HOSTILE_TEXT, SHORT, TEXTS, acts, hostile_trajectory
from libra.driver.run_console import ShownFormatter
from libra.observe.inspect import inspect_run
from libra.observe.page_document import workers_html
from libra.observe.progress import RunProgress
from libra.store.trajectory_store import TrajectoryStore
from libra.testing.hostile_text import NUM_TEXTS
from libra.untrusted import shown, shown_json, shown_line, storable

pytestmark = pytest.mark.timeout(60)


@given(HOSTILE_TEXT)
def test_what_is_shown_does_not_act(text):
    assert not acts(shown(text))
    assert not acts(shown_line(text, 80)) and "\n" not in shown_line(text, 80) and len(shown_line(text, 80)) <= 80
    line = json.dumps({"x": text}, ensure_ascii=False)
    if not any(unicodedata.category(char) == "Cs" for char in text):
        assert json.loads(shown_json(line)) == {"x": text} and not acts(shown_json(line))


def test_every_text_is_shown_without_effect_in_linear_time():
    for text in TEXTS:
        assert not acts(shown(text))


def test_what_is_harmless_is_shown_as_it_is():
    text = "Zeile 1\n\tnaïve 日本語 עברית 🙂👩‍👩‍👧 [red]x[/red] <b> \\x1b[31m"
    assert shown(text) == storable(text) == text


@pytest.fixture(scope="module")
def shown_texts():
    """Texts that the word list of a tokenizer can hold."""
    return [text for text in TEXTS if len(text) <= 5000 and text == text.encode(errors="replace").decode()][::40]


@pytest.fixture
def hostile_run(tmp_path, shown_texts):
    """A run whose prompts, turns, tools and failures are hostile texts, and the words of its tokenizer too."""
    from tokenizers import Tokenizer, decoders, models

    words = {f"{place}{text}": 3 * i + j for i, text in enumerate(shown_texts) for j, place in enumerate("pgo")}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=next(iter(words))))
    tokenizer.decoder = decoders.Fuse()
    (tmp_path / "tokenizer").mkdir()
    tokenizer.save(str(tmp_path / "tokenizer" / "tokenizer.json"))
    with TrajectoryStore.create(tmp_path / "trajectories.zarr") as store:
        store.append([hostile_trajectory(i, text) for i, text in enumerate(shown_texts)], batch=0)
    return tmp_path


def test_inspect_prints_every_text_without_effect(hostile_run, shown_texts):
    for options in ({}, {"tokens": True}):
        page = io.StringIO()
        inspect_run(hostile_run, limit=NUM_TEXTS, console=Console(file=page, width=200), **options)
        assert not acts(page.getvalue()) and page.getvalue().count("trajectory") >= len(shown_texts)
    lines = io.StringIO()
    inspect_run(hostile_run, limit=NUM_TEXTS, as_json=True, console=Console(file=lines, width=200))
    assert not acts(lines.getvalue())
    found = [json.loads(line) for line in lines.getvalue().splitlines()]
    assert [page["failure_detail"] for page in found] == shown_texts, "JSON has the text itself, escaped"


class Tags(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.found = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.found.append(tag)


def test_the_page_shows_every_text_and_no_markup_of_it():
    def snapshot(text):
        return {
            "roles": [
                {"worker": text, "role": "rollout", "tp": 1, "stage": "ready", "for_s": 1.0, "from_role": "train", "from_tp": 1,
                 "generation": 1, "seconds": 1.0, "reason": text}
            ],
            "not_ready": [{"worker": text, "stage": "failed", "for_s": 1.0, "detail": text, "again_in_s": None}],
        }  # fmt: skip

    plain = Tags(workers_html(snapshot("plain"))).found
    assert len(plain) > 20
    for text in SHORT[::3]:
        page = workers_html(snapshot(text[:5000]))
        assert Tags(page).found == plain and not acts(page)


def test_progress_and_logs_show_every_text_without_effect(caplog):
    page = io.StringIO()
    progress = RunProgress("demo", 1, "http://localhost", console=Console(file=page, width=200))
    formatter = ShownFormatter("%(levelname)s: %(message)s")
    for text in SHORT[::3]:
        progress.message(text)
        record = logging.LogRecord("libra", logging.WARNING, "file", 1, "tool said %s", (text,), None)
        assert not acts(formatter.format(record))
    assert not acts(page.getvalue())
