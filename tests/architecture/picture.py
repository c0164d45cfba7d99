"""The picture of rooms and arrows in ``docs/architecture.md``, drawn from the imports: ``make docs`` writes it.

An arrow that a longer way already implies is left out, and so are arrows into the foundation, which every room may import.
"""

import sys
from pathlib import Path

from import_graph import import_graph, modules, reduced, room_graph

REPOSITORY = Path(__file__).resolve().parents[2]
PAGE = REPOSITORY / "docs" / "architecture.md"
BEGIN, END = "<!-- generated from the imports by `make docs` -->", "<!-- end of the generated part -->"

LAYERS: dict[str, dict[str, str]] = {
    "entrances": {
        "api": "`libra.train`, for Python users",
        "cli": "the commands: `libra run`, `resume`, `plan`, `simulate`, `doctor`, ...",
        "testing": "contract tests of engines, and environments without a task, for users' own tests",
    },
    "a run": {
        "driver": "submits iterations: session, resume, replanning, role and engine clients",
        "graph": "one iteration as a Dask graph: its nodes, and what each node computes",
        "worker": "what a worker process holds for a run: host, engine, replica, trajectory state",
        "scheduler": "the plugins in the Dask scheduler: parked tasks, slots, gates, gangs, roles",
    },
    "virtual time": {"sim": "runs in virtual time, under the same policies"},
    "decisions": {
        "policy": "who runs next and where: pure functions of (state, event)",
        "user_orderings": "scheduling policies by name, those of users included",
        "planner": "how many GPUs for what: exact search over a cost model",
    },
    "parts": {
        "rollout": "inference engines: transformers, vLLM",
        "train": "replica, losses, advantages, corrections, checkpoints, training groups",
        "weights": "versions: publishing, transfer, the version check",
        "transport": "authenticated connections and byte runs between processes",
        "store": "what is committed: journal, groups, batches, zarr, event log",
        "agents": "agents of users over HTTP: gateway, conversations as trees of tokens, processes",
        "envs": "environments, tools, sandbox, rewards, tool-call formats",
        "observe": "metrics, dashboard page, reports, traces, inspection",
        "cluster": "Dask workers: local, Slurm, settings, readiness",
    },
    "foundation": {
        "types": "value types shared by all rooms",
        "errors": "the tree of errors",
        "untrusted": "the border for what models and tools wrote: storable inside, harmless when shown",
        "processes": "programs that Libra starts: their environment, their end, locks",
        "named_parts": "objects that a configuration names as package.module:attribute",
        "model_loader": "a run's model and tokenizer, built by transformers or by a part of the user's own",
        "keys": "Dask keys and resource names",
        "config": "settings, their checks and effects",
        "facts": "what happened and what was decided, declared once",
        "hardware": "seconds and bytes of models on GPUs: tables, rooflines, fits",
        "tensors": "tensors on disk, hashes, dtypes",
        "tensor_files": "files of versions and checkpoints, and their digests without torch",
        "seals": "JSON that carries its own digest",
        "projections": "random projections of layers",
        "heads": "output heads in chunks",
        "experts": "routers of a mixture of experts: listening and replaying",
    },
}
"""Rooms by layer, and the content of each in a few words."""


def drawn_rooms(graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """The imports among rooms above the foundation; ``libra`` itself, which only names the public API, is left out."""
    rooms = room_graph(graph)
    hidden = {"libra", *LAYERS["foundation"]}
    return {name: targets - hidden for name, targets in rooms.items() if name not in hidden}


def mermaid(graph: dict[str, set[str]]) -> str:
    """The picture, as a Mermaid flowchart. Rooms have a prefix there because ``graph`` is a word of the language."""
    rooms = drawn_rooms(graph)
    lines, layers = ["```mermaid", "flowchart TD"], []
    for layer, contents in LAYERS.items():
        present = [name for name in contents if name in rooms]
        if present:
            layers.append(layer.replace(" ", "_"))
            lines += [f'  subgraph {layers[-1]}["{layer}"]', *(f"    room_{name}[{name}]" for name in present), "  end"]
    foundation = ", ".join(LAYERS["foundation"])
    lines.append(f'  foundation["foundation, imported by all: {foundation}"]')
    arrows = reduced(rooms)
    lines += [f"  room_{name} --> room_{target}" for name in sorted(arrows) for target in sorted(arrows[name])]
    lines += [f"  {layer} -.-> foundation" for layer in layers]
    return "\n".join([*lines, "```"])


def table(graph: dict[str, set[str]]) -> str:
    """Every room with its content and all rooms that it imports."""
    rooms = room_graph(graph)
    lines = ["| room | content | imports |", "|---|---|---|"]
    for contents in LAYERS.values():
        for name, content in contents.items():
            if name in rooms:
                lines.append(f"| `{name}` | {content} | {', '.join(sorted(rooms[name] - {'libra'})) or 'none'} |")
    return "\n".join(lines)


def generated(graph: dict[str, set[str]]) -> str:
    """The generated part of the page, markers included."""
    return "\n\n".join([BEGIN, mermaid(graph), table(graph), END])


def with_generated(page: str, graph: dict[str, set[str]]) -> str:
    """``page`` with its generated part replaced."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + generated(graph) + after


if __name__ == "__main__":
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else PAGE
    path.write_text(with_generated(path.read_text(), import_graph(modules(REPOSITORY))))
