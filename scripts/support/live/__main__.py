"""A page in the browser: speak, and see the probability of speech. Ctrl-C ends it.

The page sends what the microphone delivers, in pieces of any length, to the model silero_vad. Each tab is a sequence.
Starts a tritonserver of its own, unless --url names the gRPC address of a running one, such as that of scripts/serve.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import sys

from aiohttp import web

from support import paths
from support.live.app import MODEL, application
from support.server import ServerError, TritonServer

LOG = paths.BUILD / "live-server.log"


def main() -> int:
    """The process's exit code: 0 if it ended on request."""
    arguments = _parse(sys.argv[1:])
    try:
        with contextlib.ExitStack() as stack:
            server = None
            if arguments.url is None:
                started = TritonServer(paths.MODELS, model_control="explicit", load_models=[MODEL], log_path=LOG)
                server = stack.enter_context(started)
            return asyncio.run(_serve(arguments, server))
    except (ServerError, OSError) as error:
        print(f"live: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/live", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    option = parser.add_argument
    option("--url", metavar="HOST:PORT", help="gRPC of a running tritonserver with the model silero_vad")
    option("--port", type=int, default=8010, help="of the page (default: 8010; 0: a free one)")
    option("--address", default="127.0.0.1", help="where the port listens (default: 127.0.0.1, this machine only)")
    return parser.parse_args(arguments)


async def _serve(arguments: argparse.Namespace, server: TritonServer | None) -> int:
    """Until a signal, or the end of the server that was started for it."""
    grpc_url = arguments.url if server is None else server.grpc_url
    runner = web.AppRunner(application(grpc_url))
    await runner.setup()
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    try:
        await web.TCPSite(runner, arguments.address, arguments.port).start()
        host, port, *_ = runner.addresses[0]
        print(f"live: page     http://{host}:{port}\nlive: model    {MODEL} at {grpc_url}")
        if server is not None:
            print(f"live: log      {LOG}")
        print("live: Ctrl-C ends it", flush=True)
        while not stop.is_set():
            if server is not None and not server.is_alive():
                print(f"live: tritonserver ended by itself, with {server.exit_code}: see {LOG}", file=sys.stderr)
                return 1
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(stop.wait(), 0.2)
        print("live: ended", file=sys.stderr)
        return 0
    finally:
        await runner.cleanup()


if __name__ == "__main__":
    sys.exit(main())
