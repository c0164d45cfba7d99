"""Questions over a corpus: they can be answered by searching, and only by the right names."""

import json

import pytest

pytest.importorskip("bm25s", reason="pip install 'libra-rl[search]'")

from libra.envs import make_environment
from libra.envs.search.environment import CorpusSearch
from libra.errors import ConfigError
from libra.testing.parts import EnvironmentContract


def searched(world, prompt):
    """The answer of one who reads: searches each name in turn and takes the fact that is asked for out of the passage."""
    name = prompt.facts["start"]
    for relation in prompt.facts["relations"]:
        found = world.search(name)
        passage = world.passages[name]
        assert f"{passage.title}: {passage.text}" in found
        name = passage.facts[relation]
        assert name in found
    return name


def test_every_question_can_be_answered_by_searching(make_episode):
    world = CorpusSearch(size=60, hops=[1, 2, 3], top=3)
    assert world.search("?? zzzzz") == world.search("") == "nothing found"
    for index in range(30):
        prompt = world.prompt("train", index)
        answer = searched(world, prompt)
        assert world.grade(make_episode(prompt, f"It is <answer> the {answer.upper()}. </answer>")) == 1.0
        assert world.grade(make_episode(prompt, answer)) == 0.0, "not between tags"
        assert world.grade(make_episode(prompt, "<answer>Nobody</answer>")) == 0.0
        assert answer not in prompt.messages[-1]["content"]


def test_partial_answers_have_the_f1_of_their_words(make_episode):
    world = CorpusSearch(partial=True, answer="text", size=60)
    prompt = next(p for p in (world.prompt("train", i) for i in range(99)) if len(p.facts["answer"].split()) == 2)
    first, second = prompt.facts["answer"].split()
    given = {f"{first} {second}": 1.0, first: 2 / 3, f"{first} and {second} perhaps": 2 / 3, "": 0.0, "x": 0.0}
    for answer, reward in given.items():
        assert world.grade(make_episode(prompt, answer)) == pytest.approx(reward)


def test_splits_and_worlds(make_episode):
    worlds, texts = [CorpusSearch(seed=seed, examples=2) for seed in (0, 1)], {}
    for split in ("train", "eval"):
        texts[split] = {world.prompt(split, i).messages[-1]["content"] for world in worlds for i in range(200)}
    assert not texts["train"] & texts["eval"]
    assert not set(worlds[0].passages) & set(worlds[1].passages) or worlds[0].passages != worlds[1].passages
    assert [worlds[0].prompt("eval", i).facts["hops"] for i in range(4)] == [1, 2, 1, 2]
    example = worlds[0].prompt("train", 5).messages[1:-1]
    assert [each["role"] for each in example if each["role"] != "tool"][:3] == ["user", "assistant", "assistant"]
    assert example[0]["content"] not in texts["train"] | texts["eval"]


def test_a_corpus_of_ones_own(tmp_path):
    path = tmp_path / "corpus.jsonl"
    books = [
        (f"Book {i}", f"Book {i} was written by Writer {i % 3}.", {"author": f"Writer {i % 3}"}) for i in range(40)
    ]
    writers = [(f"Writer {i}", f"Writer {i} was born in Town {i}.", {"birthplace": f"Town {i}"}) for i in range(3)]
    rows = [{"title": title, "text": text, "facts": facts} for title, text, facts in (*books, *writers)]
    path.write_text("\n".join(map(json.dumps, rows)))
    world = make_environment("search", {"corpus": str(path), "hops": [2]}, 0)
    prompt = world.prompt("train", 0)
    assert prompt.messages[-1]["content"].startswith("What is the birthplace of the author of Book ")
    assert prompt.facts["answer"] == searched(world, prompt)


@pytest.mark.parametrize(
    "args", [{"corpus": "/nowhere"}, {"hops": []}, {"hops": [0]}, {"top": 0}, {"size": 3}, {"answer": "json"}]
)
def test_wrong_arguments_are_named(args):
    with pytest.raises(ConfigError, match=f"environment.args.{next(iter(args))}"):
        CorpusSearch(**args)


@pytest.mark.parametrize("line", ["no json", "[1]", '{"title": "a"}', '{"title": "a", "text": "b", "facts": [1]}'])
def test_a_line_that_is_no_passage_is_named(line, tmp_path):
    path = tmp_path / "corpus.jsonl"
    path.write_text('{"title": "a", "text": "b"}\n' + line)
    with pytest.raises(ConfigError, match="line 2"):
        CorpusSearch(corpus=str(path))


class TestSearch(EnvironmentContract):
    turns = ('<tool_call>{"name": "search", "arguments": {"query": "a"}}</tool_call>', "<answer>b</answer>")

    def make_environment(self):
        return CorpusSearch()
