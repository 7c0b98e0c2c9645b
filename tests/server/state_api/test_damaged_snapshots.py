"""Snapshots that are damaged, foreign, or lie: they are refused, and nothing changes. One that is accepted is equal."""

import json
import re
import zlib

import numpy as np
import pytest

from harness import models
from harness.models import booked, ledger
from harness.raw import Answer, Refused
from harness.repetitions import repeated
from harness.state_api import StateSequence, element, refused

#: The bytes in front of the header.
PREFIX = 20


def made_of(
    header: object, data: bytes, magic: bytes = b"TRTSTATE", version: int = 1, length: int | None = None
) -> bytes:
    """A snapshot with a checksum that is right."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    rest = (len(text) if length is None else length).to_bytes(4, "little") + text + data
    return magic + version.to_bytes(4, "little") + zlib.crc32(rest).to_bytes(4, "little") + rest


def parts_of(snapshot: bytes) -> tuple[dict, bytes]:
    """The header and the data."""
    behind = PREFIX + int.from_bytes(snapshot[16:20], "little")
    return json.loads(snapshot[PREFIX:behind]), snapshot[behind:]


class Target:
    """A sequence that is asked to go on from each of many snapshots, on one stream."""

    def __init__(self, stream, talk: StateSequence):
        self.stream, self.talk, self.model = stream, talk, talk.model
        self.before = stream.ask(self.model.name, {}, {"sequence_id": talk.sequence_id, "snapshot": True})
        self.snapshot: bytes = self.before.outputs["state_snapshot"].item()

    def answers(self, snapshots: list[bytes]) -> list[Answer | Refused]:
        """What comes of each; all are sent before the first answer is read."""
        for at in range(0, len(snapshots), 500):
            some = snapshots[at : at + 500]
            first = self.stream.count
            for content in some:
                inputs = {"state_snapshot": element(content, self.model)}
                self.stream.send(self.model.name, inputs, {"sequence_id": self.talk.sequence_id, "snapshot": True})
            replies = self.stream.all_replies(len(some))
            yield from (replies[first + number] for number in range(len(some)))

    def refuses(self, snapshots: list[bytes]) -> None:
        """Every one, unless the sequence then has what it had before."""
        for content, answer in zip(snapshots, self.answers(snapshots), strict=True):
            if isinstance(answer, Refused):
                assert answer.text.startswith("SNAPSHOT_INVALID: "), (content, answer)
                assert "nothing has changed" in answer.text
            else:
                assert answer.outputs["state_snapshot"].item() == self.snapshot, content
        now = self.stream.ask(self.model.name, {}, {"sequence_id": self.talk.sequence_id, "snapshot": True})
        assert now.outputs["state_snapshot"].item() == self.snapshot
        self.talk.states()
        self.talk.step(get_state=True)


@pytest.fixture
def target(serve, connect):
    """`ledger` holds its SCALE; other models have strings, a context, or many states."""

    def made(make=ledger, **parameters) -> Target:
        model = serve(make, parameters=parameters or ({"held_inputs": "SCALE"} if make is ledger else {}))
        talk = StateSequence(connect(), model, np.random.default_rng(11))
        talk.start()
        talk.step()
        return Target(connect("stream"), talk)

    return made


def words(name: str, **changes):
    return models.append("string", name, **changes)


def framed(name: str, **changes):
    return models.framed(name, ["N", "T"], (3, 1), (-1,), **changes)


@pytest.mark.parametrize("make", [ledger, words, *repeated(framed, models.caches)])
def test_truncated_at_every_length_and_made_longer(target, make):
    of = target(make)
    whole = of.snapshot
    of.refuses([whole[:length] for length in range(len(whole))] + [whole + more for more in (b"\0", b"x" * 100, whole)])


@pytest.mark.parametrize("make", [ledger, words, *repeated(framed, models.caches)])
def test_each_byte_flipped(target, make):
    of = target(make)
    rng = np.random.default_rng(5)

    def flipped(at: int, mask: int) -> bytes:
        return of.snapshot[:at] + bytes([of.snapshot[at] ^ mask]) + of.snapshot[at + 1 :]

    of.refuses([flipped(at, mask) for at in range(len(of.snapshot)) for mask in (1, 128, int(rng.integers(1, 256)))])


@pytest.mark.parametrize("seed", [1, *repeated(2, 3, 4)])
def test_random_bytes(target, seed):
    of = target()
    rng = np.random.default_rng(seed)
    noise = [rng.bytes(int(rng.integers(0, 600))) for _ in range(500)]
    mixed = [of.snapshot[: int(rng.integers(0, 200))] + content for content in noise]
    right = [made_of(content[:100], content[100:]) for content in noise]
    of.refuses(noise + mixed + right)


def lies(header: dict, rng: np.random.Generator) -> dict:
    """The header with one thing changed."""
    made = json.loads(json.dumps(header))
    numbers: tuple = (
        -1,
        0,
        1,
        7,
        2**31,
        2**32,
        2**62,
        2**63 - 1,
        2**63,
        2**64 - 1,
        2**64,
        1e300,
        0.5,
        None,
        "8",
        [],
        {},
    )
    pick = lambda values: values[int(rng.integers(len(values)))]  # noqa: E731
    group = pick(["states", "contexts", "held_inputs"])
    change = pick(["size", "shape", "type", "name", "remove", "twice", "swap", "field", "top", "more"])
    entries = made[group]
    if change == "top":
        made[pick([*made, "other"])] = pick([*numbers, [None], [{}], "x"])
    elif change == "more":
        entries.append({"name": "EXTRA", "datatype": "INT64", "shape": [1], "byte_size": pick([0, 8, 2**63])})
    elif not entries:
        made.pop(group)
    elif change == "remove":
        entries.pop(int(rng.integers(len(entries))))
    elif change == "swap":
        entries.reverse()
    else:
        entry = pick(entries)
        if change == "size":
            entry["byte_size"] = pick(numbers)
        elif change == "shape":
            dims = [*entry["shape"], 1]
            dims[int(rng.integers(len(dims)))] = pick(numbers)
            entry["shape"] = pick([dims, dims[:-1], [], [2**32, 2**32], [-1], pick(numbers)])
        elif change == "type":
            entry["datatype"] = pick(["FP32", "INT32", "BYTES", "UINT64", "", "TYPE_INT64", None, 5])
        elif change == "name":
            entry["name"] = pick(["", "OTHER", "SUM", "LOG", "SCALE", "INPUT", "x" * 10_000, None])
        elif change == "twice":
            entries.append(dict(entry))
        else:
            entry.pop(pick(list(entry)))
    return made


@pytest.mark.parametrize("make", [ledger, words, framed, *repeated(models.caches)])
def test_headers_that_lie_with_a_right_checksum(target, make):
    """One that says the same in other words is accepted, and equal."""
    of = target(make)
    header, data = parts_of(of.snapshot)
    rng = np.random.default_rng(6)
    made = [made_of(lies(header, rng), data) for _ in range(1500)]
    made += [made_of(lies(header, rng), data + rng.bytes(8)) for _ in range(200)]
    made += [made_of(header, data, length=length) for length in (0, 1, 2**31, 2**32 - 1, len(data))]
    made += [made_of(header, data, version=version) for version in (0, 2, 2**32 - 1)]
    made += [made_of(header, data, magic=magic) for magic in (b"TRTSTATF", b"trtstate", b"\0" * 8)]
    made += [made_of(b"", data), made_of(b"{}", data), made_of(b"[" * 100_000, data), made_of(b"\xff\xfe", data)]
    made += [made_of(header, b""), made_of(header, data[:-1]), made_of(header, data + b"\0")]
    of.refuses([content for content in made if not changes_steps(content, header)])


def changes_steps(content: bytes, header: dict) -> bool:
    """A snapshot with another number of steps is a good one."""
    try:
        return content[8:12] == b"\1\0\0\0" and parts_of(content)[0]["steps"] != header["steps"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return False


@pytest.mark.parametrize("group", ["states", "held_inputs"])
def test_a_tensor_twice(target, group):
    """The second would replace the first."""
    of = target()
    header, data = parts_of(of.snapshot)
    header[group].append(header[group][-1])
    more = header[group][-1]["byte_size"]
    [came] = of.answers([made_of(header, data + b"\7" * more)])
    assert isinstance(came, Refused) and came.text.startswith("SNAPSHOT_INVALID: "), came
    of.talk.states()


def test_strings_whose_lengths_lie(target):
    of = target(words)
    header, data = parts_of(of.snapshot)
    made = []
    for length in (1, 2**16, 2**31, 2**32 - 1):
        made.append(made_of(header, length.to_bytes(4, "little") + data[4:]))
    made.append(made_of(header, b"\xff" * len(data)))
    of.refuses(made)


def test_other_words_for_the_same_are_the_same(target):
    """Spaces, and fields that this format does not have."""
    of = target()
    header, data = parts_of(of.snapshot)
    same = [made_of(json.dumps(header, indent=3).encode(), data), made_of({**header, "made_by": "me"}, data)]
    for answer in of.answers(same):
        assert isinstance(answer, Answer), answer
        assert answer.outputs["state_snapshot"].item() == of.snapshot


def test_a_header_longer_than_the_model_needs_is_not_read(target):
    """It would hold up the other requests of the model."""
    of = target()
    header, data = parts_of(of.snapshot)
    text = json.dumps(header).encode()
    named = {**header, "states": [{"name": "x" * 1_000_000, "datatype": "INT64", "shape": [1, 1], "byte_size": 8}]}
    for bad in (made_of(text + b" " * 5000, data), made_of(named, data), made_of({**header, "x": [1] * 9999}, data)):
        [came] = of.answers([bad])
        assert isinstance(came, Refused)
        said = r"SNAPSHOT_INVALID: the snapshot is of another model: its header has (\d+) bytes, and the model's at most \d+;"
        found = re.match(said, came.text)
        assert found and int(found[1]) == int.from_bytes(bad[16:20], "little"), came
    of.talk.states()


def test_a_start_with_a_bad_snapshot_begins_nothing(target):
    of = target()
    client, other = of.talk.client, of.talk.other()
    for bad in (b"", of.snapshot[:-1], b"TRTSTATE"):
        inputs = {**booked(1), "state_snapshot": element(bad, of.model)}
        with refused("SNAPSHOT_INVALID"):
            client.ask(of.model.name, inputs, {"sequence_id": other.sequence_id, "sequence_start": True})
    with refused("SEQUENCE_MISSING"):
        other.states()
    other.start()


@pytest.mark.parametrize("shape", [(1, 2), (1, 0), (2, 1)])
def test_a_snapshot_is_one_string(target, shape):
    of = target()
    content = np.full(shape, of.snapshot, np.object_)
    with pytest.raises(Refused):
        of.talk.client.ask(of.model.name, {"state_snapshot": content}, {"sequence_id": of.talk.sequence_id})
    of.talk.states()


OTHERS = {
    "another_type": lambda name, **more: models.counter("int64", name, **more),
    "another_width": lambda name, **more: models.counter("fp32", name, width=5, **more),
    "another_name": lambda name, **more: models.crossed(name, **more),
    "stored_as_fp16": lambda name, **more: models.counter(
        "fp32", name, **{**more, "parameters": {**more.get("parameters", {}), "store_states_as_fp16": "1"}}
    ),
}


@pytest.mark.parametrize("case", OTHERS)
def test_a_snapshot_of_another_model(deployment, serve, connect, case):
    """What the other model keeps in another way fits, if it has the same states."""
    client = connect()
    one = StateSequence(client, serve(models.counter))
    one.start()
    saved = one.save()
    other = StateSequence(client, serve(lambda name, **more: OTHERS[case](f"{name}_other", **more)))
    other.start()
    if case == "stored_as_fp16":
        came = client.ask(
            other.model.name, {"state_snapshot": saved.tensor}, {"sequence_id": other.sequence_id, "get_state": True}
        )
        half = one.oracle.state("STATE_IN").astype(np.float16).astype(np.float32)
        assert came.outputs["state.STATE_IN"].tolist() == half.tolist()
        return
    with other.refuses("SNAPSHOT_INVALID", "of another model"):
        other.ask(restore=saved)


def test_contexts_and_held_inputs_must_fit_too(serve, connect):
    client = connect()
    held = StateSequence(
        client, serve(lambda name, **more: ledger(f"{name}_held", **more), parameters={"held_inputs": "SCALE"})
    )
    plain = StateSequence(client, serve(lambda name, **more: ledger(f"{name}_plain", **more)))
    for one in (held, plain):
        one.start()
    with plain.refuses("SNAPSHOT_INVALID", "held inputs", "SCALE"):
        plain.ask(restore=held.save())
    short = StateSequence(
        client, serve(lambda name, **more: models.framed(f"{name}_short", ["N", "T"], (3, 1), (-1,), **more))
    )
    long = StateSequence(
        client, serve(lambda name, **more: models.framed(f"{name}_long", ["N", "T"], (4, 1), (-1,), **more))
    )
    for one in (short, long):
        one.start()
    with long.refuses("SNAPSHOT_INVALID", "FRAMES=3@1", "FRAMES=4@1"):
        long.ask(restore=short.save())


def test_a_context_along_another_axis_is_foreign(serve, connect):
    def along(axis: int) -> StateSequence:
        dims = tuple(-1 if other == axis else 4 for other in (1, 2))
        says = f"FRAMES=2@{axis}:whole"

        def make(name, **more):
            shape = ["N", 4, 4]
            return models.framed(f"{name}_{axis}", shape, (2, axis), dims, says, first="whole", window=4, **more)

        return StateSequence(connect(), serve(make))

    rows, columns = along(1), along(2)
    for one in (rows, columns):
        one.start({"FRAMES": np.arange(16, dtype=np.float32).reshape(1, 4, 4)})
    with columns.refuses("SNAPSHOT_INVALID", "FRAMES=2@1:whole", "FRAMES=2@2:whole"):
        columns.ask(restore=rows.save())
    rows.ask(restore=rows.save())
