"""The folder of one evaluation: protocol.json (what was asked, and every start), samples.jsonl (a line a sample, appended as it
finishes), summary.json, lock. The same command goes on where an earlier one stopped; another protocol is refused."""
import fcntl
import json
from pathlib import Path

from common import evaluation
from common.cli import Stop, write_atomic

PROTOCOL, SAMPLES, SUMMARY = "protocol.json", "samples.jsonl", "summary.json"


def lock(folder):
    """The open lock file of a folder, which must be kept: two processes never write the same samples."""
    file = open(Path(folder) / "lock", "w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise Stop(f"{folder} belongs to another process, which is still at work") from None
    return file


def enter(folder, protocol):
    """(lock, {(problem, sample)} that are there already). Makes the folder, or checks that its samples were drawn under the same
    protocol."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    held = lock(folder)
    if not (folder / PROTOCOL).exists() and (other := sorted(p.name for p in folder.iterdir() if p.name != "lock")):
        raise Stop(f"{folder} holds {other[0]} and no {PROTOCOL}: it is no folder of an evaluation")
    done = drawn(folder / SAMPLES)
    if done:
        begun = json.loads((folder / PROTOCOL).read_text())["protocol"]
        if changed := [key for key in {**begun, **protocol} if begun.get(key) != protocol.get(key)]:
            told = ", ".join(f"{key} {begun.get(key)} -> {protocol.get(key)}" for key in changed)
            raise Stop(f"{folder} was begun with another protocol ({told}): undo that or use another --out")
    else:
        write_json(folder / PROTOCOL, {"protocol": protocol, "starts": []})
    return held, done


def drawn(path):
    """{(problem, sample)} of a file of lines; a last line that a crash cut short is taken away."""
    if not path.exists():
        return set()
    with open(path, "rb+") as f:
        size, whole = 0, 0
        for text in f:
            size += len(text)
            whole = size if text.endswith(b"\n") else whole
        if whole < size:
            f.truncate(whole)
    found = set()
    for one in evaluation.read(path):
        if (one["id"], one["sample"]) in found:
            raise Stop(f"{path} has sample {one['sample']} of problem {one['id']!r} twice")
        found.add((one["id"], one["sample"]))
    return found


def add_start(folder, start):
    """Append what is known of one start (versions, hardware, folders) to protocol.json."""
    path = Path(folder) / PROTOCOL
    found = json.loads(path.read_text())
    write_json(path, {**found, "starts": [*found["starts"], start]})


def finish(folder):
    """Write summary.json from the samples and return it."""
    found = evaluation.summary(evaluation.read(Path(folder) / SAMPLES))
    write_json(Path(folder) / SUMMARY, found)
    return found


def write_json(path, found):
    write_atomic(path, json.dumps(found, indent=1) + "\n")
