"""The demo: sends many streams of speech through a real server, checks the answers, and draws a picture.

Each stream is a part of the recording. Its client sends 20 ms of sound with each request over gRPC, as a microphone
delivers it. The server keeps the samples of the next chunk of 32 ms, the stream's state and the end of its last chunk,
and runs chunks of several streams as one batch.

Part 1: every client waits for its answer before it sends the next request. Every answer is compared with ONNX Runtime
alone. Part 2: every client sends a request every 20 ms, as a microphone does. The costs are compared with those of one
ONNX Runtime session for each stream, unless other processes may have decided which is cheaper.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import tritonclient.grpc.aio as grpc_client
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from tritonclient.utils import InferenceServerException

from support import paths
from support.arguments import positive
from support.cpu_use import CORES
from support.real_time import STATE_BYTES, Try, tries
from support.real_time_senders import GIVE_UP_S, LATE_S, LATE_SHARE, RefusedError, streams_of
from support.server import ServerError, TritonServer
from support.session_per_stream import SessionPerStream
from support.session_per_stream import measure as measure_session_per_stream
from support.speech import CHUNK_S, PACKET_S, SAMPLE_RATE, Stream, cut_streams, read_recording, silero_oracle
from triton_stateful import AsyncSequence, StatefulError

MODEL = "silero_vad"
TOLERANCE = 1e-5
LOG = paths.BUILD / "demo-server.log"
PICTURED_STREAMS = 4
FEW_STEPS_A_RUN = 4
CHECKED_AT_PACE = 40

#: Printed before the results, so that no word in them is unknown.
HOW_ANSWERS_ARE_CHECKED = (
    f"Each request brings {PACKET_S * 1e3:.0f} ms of sound. The server makes a step of the model for each chunk of "
    f"{CHUNK_S * 1e3:.0f} ms that is complete. Each answer is compared with ONNX Runtime alone, which runs the same "
    "model on one stream at a time, with a batch of one. The answers are right if none differs by more than "
    f"{TOLERANCE:.0e}."
)
HOW_PACE_IS_JUDGED = (
    f"Now each stream sends a request every {PACKET_S * 1e3:.0f} ms, whether or not the last one is answered. Latency "
    "counts from the time when the request that completes a chunk was due. An answer is late if its latency is above "
    f"{LATE_S * 1e3:.0f} ms. The pace is held if at most {LATE_SHARE:.0%} of the answers are late and no client falls "
    f"{GIVE_UP_S} s behind. If it is not held, the demo tries fewer streams."
)
NO_COMPARISON = "No comparison with a session for each stream:"
AGAIN = "Try again when the machine has less to do."


@dataclass
class Answers:
    """What came back for one stream, a value a step."""

    probabilities: list[float] = field(default_factory=list)
    latencies_s: list[float] = field(default_factory=list)


@dataclass
class Comparison:
    """How far the answers are from those of ONNX Runtime alone."""

    steps: int
    bit_equal: int
    worst: float  # the largest absolute difference

    @property
    def passed(self) -> bool:
        """Whether all that was compared is right. Nothing is not enough."""
        return self.steps > 0 and self.worst <= TOLERANCE


async def follow(
    client: grpc_client.InferenceServerClient, sequence_id: int, stream: Stream, on_step: Callable[[], None]
) -> Answers:
    """One client's life: START with the first packet, each next one after the answer, END with the last.

    StatefulError if a request is refused.
    """
    answers = Answers()
    sequence = AsyncSequence(client, MODEL, sequence_id)
    for number, samples in enumerate(stream.packets):
        sent_at = time.perf_counter()
        outputs = await sequence.step(samples[None], end=number == len(stream.packets) - 1)
        # None if the packet doesn't complete a chunk.
        for probability in outputs["output"].ravel():
            answers.latencies_s.append(time.perf_counter() - sent_at)
            answers.probabilities.append(float(probability))
            on_step()
    return answers


async def serve_all(server: TritonServer, streams: list[Stream], progress: Progress) -> tuple[list[Answers], float]:
    """All streams at once. Their answers, and the seconds from the first request to the last answer."""
    bar = progress.add_task("streaming", total=sum(stream.steps for stream in streams))
    async with grpc_client.InferenceServerClient(server.grpc_url) as client:
        started = time.perf_counter()
        clients = [
            asyncio.create_task(follow(client, index + 1, stream, lambda: progress.advance(bar)))
            for index, stream in enumerate(streams)
        ]
        try:
            answers = await asyncio.gather(*clients)
        finally:
            for task in clients:
                task.cancel()
        return answers, time.perf_counter() - started


async def batch_sizes(server: TritonServer) -> dict[int, int]:
    """How many times the model ran with each batch size, as Triton counted."""
    async with grpc_client.InferenceServerClient(server.grpc_url) as client:
        statistics = await client.get_inference_statistics(MODEL)
    [model] = statistics.model_stats
    return {batch.batch_size: batch.compute_infer.count for batch in model.batch_stats}


def compare(streams: list[Stream], answers: list[list[float]], on_stream: Callable[[Stream], None]) -> Comparison:
    """Compares every answer with ONNX Runtime alone, one stream after another."""
    total = sum(stream.steps for stream in streams)
    oracle = silero_oracle()
    bit_equal, worst = 0, 0.0
    for stream, given in zip(streams, answers, strict=True):
        sequence = oracle.new_sequence()
        steps = [sequence.step({"input": samples[None]})["output"].item() for samples in stream.inputs]
        right = np.array(steps, np.float32)
        came = np.array(given, np.float32)
        difference = np.abs(came - right)
        # a NaN must not pass for a small difference
        worst = max(worst, float(np.where(np.isnan(difference), np.inf, difference).max()))
        bit_equal += int((came == right).sum())
        on_stream(stream)
    return Comparison(total, bit_equal, worst)


def results_table(streams: list[Stream], answers: list[Answers], seconds: float, checked: Comparison) -> Table:
    """The figures of the run."""
    requests = sum(len(stream.packets) for stream in streams)
    latencies_ms = np.concatenate([given.latencies_s for given in answers]) * 1e3
    lengths = sorted(stream.seconds for stream in streams)
    p50, p99 = np.percentile(latencies_ms, [50, 99])
    table = Table(title=f"{len(streams)} streams of speech through {MODEL}", show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column(justify="right")
    table.add_row("streams", f"{len(streams)}, of {lengths[0]:.0f} to {lengths[-1]:.0f} s")
    table.add_row("requests", f"{requests:,} in {seconds:.1f} s")
    table.add_row("requests per second", f"{requests / seconds:,.0f}")
    table.add_row("audio per second", f"{sum(lengths) / seconds:,.0f} s")
    table.add_row("latency p50 / p99", f"{p50:.1f} / {p99:.1f} ms")
    verdict = "[green]right[/]" if checked.passed else "[red]WRONG[/]"
    table.add_row("answers", verdict)
    table.add_row("  equal to the last bit", f"{checked.bit_equal:,} of {checked.steps:,}")
    table.add_row("  largest difference", f"{checked.worst:.1e} (allowed: {TOLERANCE:.0e})")
    return table


def batches_table(runs: dict[int, int]) -> Table:
    """How large the batches were: 1, 2 to 3, 4 to 7 and so on."""
    steps = sum(size * count for size, count in runs.items())
    table = Table(title="batch sizes (Triton's statistics)", title_justify="left")
    table.add_column("batch size", justify="right")
    table.add_column("runs", justify="right")
    table.add_column("share of all steps")
    low = 1
    while runs and low <= max(runs):
        high = low * 2 - 1
        group = {size: count for size, count in runs.items() if low <= size <= high}
        share = sum(size * count for size, count in group.items()) / steps
        label = str(low) if low == high else f"{low} to {high}"
        table.add_row(label, f"{sum(group.values()):,}", f"{share:4.0%} " + "█" * round(share * 30))
        low = high + 1
    if runs:
        table.caption = f"{sum(runs.values()):,} runs, {steps / sum(runs.values()):.1f} steps per run on average"
    return table


@dataclass
class Costs:
    """What a step costs in ONNX Runtime: here, and with a session for each stream. In microseconds."""

    least: float  # of this server, without what other processes may have added
    most: float
    per_stream: float


def why_not_comparable(done: list[Try], cost: Costs) -> str | None:
    """Why other processes may have decided which side is cheaper. None if they cannot have."""
    for went in done:
        if went.failed_by_others:
            return (
                f"{went.pace.streams} streams and their clients need {went.needed_cores:.1f} CPU cores, but "
                f"{went.cpu.told()}. With fewer streams, batches are smaller."
            )
    if (cost.least < cost.per_stream) != (cost.most < cost.per_stream):
        return (
            f"{done[-1].cpu.told()}. Without them, the time in ONNX Runtime per step may be anything from "
            f"{cost.least:.0f} to {cost.most:.0f} µs. With a session for each stream it is {cost.per_stream:.0f} µs."
        )
    return None


def costs(held: Try, per_stream: SessionPerStream) -> Costs:
    return Costs(*held.infer_us_per_step, per_stream.cpu_s_per_step * 1e6)


def _span(least: float, most: float, form: str) -> str:
    """Both, or one number where they are the same."""
    first, second = form.format(least), form.format(most)
    return second if first == second else f"{first} to {second}"


def real_time_table(
    held: Try, asked: int, per_stream: SessionPerStream, checked: Comparison, *, compared: bool
) -> Table:
    """The costs at the pace of real time, beside those of a session for each stream if the two can be compared."""
    streams, audio_s = held.pace.streams, held.pace.packets * PACKET_S
    p50, p99 = held.latency_ms
    cost = costs(held, per_stream)
    how = "" if held.outcome.held else ", not held"
    table = Table(title=f"{streams} streams at the pace of real time{how}", title_justify="left")
    table.add_column(style="bold", no_wrap=True)
    table.add_column("this server\n(gRPC)", justify="right", no_wrap=True)
    if compared:
        table.add_column("a session\nper stream\n(no network)", justify="right", no_wrap=True)
        table.add_column("ratio", justify="right", no_wrap=True)

    def row(what: str, ours: str, theirs: str = "", ratio: str = "") -> None:
        table.add_row(what, ours, *([theirs, ratio] if compared else []))

    if streams < asked:
        row("streams asked for", f"{asked}: not held")
    row("requests per second", f"{streams / PACKET_S:,.0f}")
    row("latency p50 / p99", f"{p50:.1f} / {p99:.1f} ms")
    row("late answers", f"{held.outcome.late_share:.2%}")
    steps_a_run = held.cost.steps / max(held.cost.runs, 1)
    row("steps per run", f"{steps_a_run:.1f}", "1")
    server_cores, per_stream_cores = held.cost.cpu_s / audio_s, per_stream.cpu_s_per_step * streams / CHUNK_S
    for what, (least, most), theirs, form, unit in (
        ("time in ONNX Runtime per step", (cost.least, cost.most), cost.per_stream, "{:.0f}", "µs"),
        ("CPU time per step, in all", (held.cpu_us_per_step,) * 2, cost.per_stream, "{:.0f}", "µs"),
        ("CPU cores for all streams", (server_cores, server_cores), per_stream_cores, "{:.2f}", ""),
        ("memory per stream", (STATE_BYTES / 1e3,) * 2, per_stream.bytes_per_stream / 1e3, "{:,.1f}", "kB"),
    ):
        ours = f"{_span(least, most, form)} {unit}".rstrip()
        row(what, ours, f"{form.format(theirs)} {unit}".rstrip(), _span(least / theirs, most / theirs, "{:.3g}"))
    client_cores = held.outcome.client_cpu_s / audio_s
    table.caption = (
        f"The clients used {client_cores:.1f} of this machine's {CORES} CPU cores; {held.cpu.told()}. "
        f"{checked.bit_equal:,} of the {checked.steps:,} answers that were checked are equal to the last bit."
    )
    if steps_a_run < FEW_STEPS_A_RUN:
        table.caption += " Batches were small: few streams share little, and gRPC costs each request the same."
    return table


def draw(
    streams: list[Stream], answers: list[Answers], held: Try, cost: Costs, why_not: str | None, path: Path
) -> None:
    """The first few streams with the probability of speech; below, latency and cost at the pace of real time."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shown = list(zip(streams, answers, strict=True))[:PICTURED_STREAMS]
    rows = len(shown) + 1
    figure = plt.figure(figsize=(12, 2.1 * rows + 0.6), layout="constrained")
    grid = figure.add_gridspec(rows, 2, height_ratios=[1] * len(shown) + [1.3])
    for row, (stream, given) in enumerate(shown):
        _draw_stream(figure.add_subplot(grid[row, :]), stream, given)
    _draw_latencies(figure.add_subplot(grid[-1, 0]), held)
    _draw_costs(figure.add_subplot(grid[-1, 1]), cost, why_not)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _draw_stream(axis, stream: Stream, given: Answers) -> None:
    seconds = np.arange(len(stream.samples)) / SAMPLE_RATE
    axis.plot(seconds, stream.samples, color="0.65", linewidth=0.4, rasterized=True)
    axis.set_ylim(-1.05, 1.05)
    axis.set_xlim(0, stream.seconds)
    axis.set_xlabel("time, s", fontsize=8)
    axis.set_ylabel("amplitude\n(full scale: 1)", color="0.5", fontsize=8)
    title = f"{stream.name}: from {stream.start_s:.1f} s of the recording, gain {stream.gain:.2f}"
    axis.set_title(title, loc="left", fontsize=9)
    speech = axis.twinx()
    steps = np.arange(stream.steps) * CHUNK_S
    speech.plot(steps, given.probabilities, color="tab:blue", linewidth=1.2)
    speech.fill_between(steps, 0, given.probabilities, color="tab:blue", alpha=0.15)
    speech.set_ylim(-1.05, 1.05)
    speech.set_yticks([0, 0.5, 1])
    speech.set_ylabel("probability of\nspeech (0 to 1)", color="tab:blue", fontsize=8)


def _draw_latencies(axis, held: Try) -> None:
    latencies = held.outcome.latencies_s * 1e3
    axis.hist(latencies, bins=60, color="tab:blue")
    axis.axvline(LATE_S * 1e3, color="tab:red", linewidth=1)
    axis.set_yscale("log")
    axis.set_xlabel("latency, ms (linear; late answers are right of the red line)", fontsize=8)
    axis.set_ylabel("answers\n(logarithmic)", fontsize=8)
    title = f"Latency of {held.pace.streams} streams at the pace of real time;\n{held.cpu.told()}"
    axis.set_title(title, loc="left", fontsize=9)


def _draw_costs(axis, cost: Costs, why_not: str | None) -> None:
    if why_not:
        axis.set_axis_off()
        axis.text(0, 0.9, textwrap.fill(f"{NO_COMPARISON} {why_not}", 70), va="top", fontsize=9)
        return
    bars = {"a session\nper stream": cost.per_stream, "this server": cost.most}
    doubt = [[0, cost.most - cost.least], [0, 0]]
    axis.barh(list(bars), list(bars.values()), color=["0.65", "tab:blue"], xerr=doubt)
    axis.set_xlabel("time in ONNX Runtime per step, µs (linear; line: may be due to other processes)", fontsize=8)
    axis.set_title("What batching saves", loc="left", fontsize=9)


def run(arguments: argparse.Namespace, console: Console) -> bool:
    """The whole demo; whether every answer was right."""
    streams = cut_streams(read_recording(), arguments.streams, arguments.seed)
    columns = (
        TextColumn("{task.description:10}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("steps"),
        TimeElapsedColumn(),
    )
    began = time.perf_counter()
    with TritonServer(paths.MODELS, log_path=LOG) as server:
        ready_s = time.perf_counter() - began
        console.print(f"tritonserver is ready after {ready_s:.1f} s (process {server.pid}, gRPC on {server.grpc_url})")
        with Progress(*columns, console=console) as progress:
            answers, seconds = asyncio.run(serve_all(server, streams, progress))
            runs = asyncio.run(batch_sizes(server))
            bar = progress.add_task("checking", total=sum(stream.steps for stream in streams))
            probabilities = [given.probabilities for given in answers]
            checked = compare(streams, probabilities, lambda stream: progress.advance(bar, stream.steps))
        console.print()
        console.print(HOW_ANSWERS_ARE_CHECKED, highlight=False)
        console.print(results_table(streams, answers, seconds, checked))
        console.print(batches_table(runs))
        console.print()
        console.print(HOW_PACE_IS_JUDGED, highlight=False)
        done = tries(server, MODEL, arguments.real_time, arguments.seed, lambda went: tell(went, console))
    held = done[-1]
    if held.outcome.gave_up:
        told = f"this machine is too busy to send {held.pace.streams} streams in real time: {held.cpu.told()}"
        console.print(f"[red]failed:[/] {told}")
        return False
    checked_at_pace = check_at_pace(held)
    per_stream = measure_session_per_stream(streams)
    cost = costs(held, per_stream)
    why_not = why_not_comparable(done, cost)
    console.print()
    console.print(real_time_table(held, arguments.real_time, per_stream, checked_at_pace, compared=not why_not))
    if why_not:
        console.print(f"[yellow]{NO_COMPARISON}[/] {why_not} {AGAIN}", highlight=False)
    draw(streams, answers, held, cost, why_not, arguments.out)
    # not through the console: a path must stay on one line
    print(f"picture:    {arguments.out}\nserver log: {LOG}")
    return checked.passed and checked_at_pace.passed


def tell(went: Try, console: Console) -> None:
    """A line for each try."""
    if went.outcome.gave_up:
        told = f"given up, as the clients were {GIVE_UP_S:g} s behind"
    else:
        p50, p99 = went.latency_ms
        how = "held" if went.outcome.held else "not held"
        told = f"{how}, latency p50 {p50:.0f} ms, p99 {p99:.0f} ms, {went.outcome.late_share:.1%} late"
    console.print(f"{went.pace.streams} streams at the pace of real time: {told}; {went.cpu.told()}")


def check_at_pace(held: Try) -> Comparison:
    """Compares the answers of some of the streams that got all their answers."""
    whole = [
        (stream, given)
        for stream, given in zip(streams_of(held.pace), held.outcome.probabilities, strict=True)
        if len(given) == stream.steps
    ]
    some = whole[:: max(1, len(whole) // CHECKED_AT_PACE)]
    return compare([stream for stream, _ in some], [given for _, given in some], lambda _: None)


def main() -> int:
    """The process's exit code: 0 if every answer was right."""
    parser = argparse.ArgumentParser(
        prog="scripts/demo", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    option = parser.add_argument
    option("--streams", type=positive, default=48, metavar="N", help="streams at once in part 1 (default: 48)")
    option(
        "--real-time",
        type=positive,
        default=300,
        metavar="N",
        help="streams in part 2; fewer if the pace is not held (default: 300)",
    )
    option(
        "--out",
        type=Path,
        default=paths.BUILD / "demo.png",
        metavar="FILE",
        help="the picture, PNG or SVG by its name (default: build/demo.png)",
    )
    option("--seed", type=int, default=1, help="chooses the parts of the recording (default: 1)")
    arguments = parser.parse_args()
    console = Console()
    try:
        return 0 if run(arguments, console) else 1
    except (ServerError, StatefulError, InferenceServerException, RefusedError) as error:
        console.print(f"[red]failed:[/] {escape(str(error))}\nserver log: {LOG}")
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
