"""Keeps a tritonserver with the stateful backend running until Ctrl-C or SIGTERM, and ends it in order.

What stands after -- goes to tritonserver as it is: scripts/serve --http-port 9000 -- --log-verbose=1
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from pathlib import Path

from support import paths
from support.server import ServerError, TritonServer


def main() -> int:
    """The process's exit code: 0 if it ended on request."""
    arguments, extra = _parse(sys.argv[1:])
    # Several may run at once, on ports of their own.
    log = paths.BUILD / f"serve-{arguments.http_port}.log"
    # Either leaves the with block, which ends the server. SIGINT too: a shell's background job ignores it.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)
    try:
        with TritonServer(
            arguments.model_repository,
            http_port=arguments.http_port,
            grpc_port=arguments.grpc_port,
            metrics_port=arguments.metrics_port,
            address=arguments.address,
            extra_args=extra,
            strict_readiness=False,
            log_path=log,
        ) as server:
            _announce(server, log)
            while server.is_alive():
                time.sleep(0.2)
            print(f"serve: tritonserver ended by itself, with {server.exit_code}: see {log}", file=sys.stderr)
            return 1
    except KeyboardInterrupt:
        print("serve: ended", file=sys.stderr)
        return 0
    except ServerError as error:
        print(f"serve: {error}", file=sys.stderr)
        return 1


def _parse(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    ours, extra = arguments, []
    if "--" in arguments:
        at = arguments.index("--")
        ours, extra = arguments[:at], arguments[at + 1 :]
    parser = argparse.ArgumentParser(
        prog="scripts/serve", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    option = parser.add_argument
    option("--model-repository", type=_folder, default=paths.MODELS, metavar="DIR", help="default: models/")
    option("--http-port", type=int, default=8000, metavar="PORT", help="default: 8000")
    option("--grpc-port", type=int, default=8001, metavar="PORT", help="default: 8001")
    option("--metrics-port", type=int, default=8002, metavar="PORT", help="default: 8002")
    option("--address", default="127.0.0.1", help="where the ports listen (default: 127.0.0.1, this machine only)")
    return parser.parse_args(ours), extra


def _folder(text: str) -> Path:
    path = Path(text).resolve()
    if not path.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {text}")
    return path


def _announce(server: TritonServer, log: Path) -> None:
    for state in server.models():
        reason = f": {state['reason']}" if state.get("reason") else ""
        print(f"serve: model {state['name']} {state.get('state', 'not loaded')}{reason}")
    print(f"serve: HTTP     http://{server.http_url}")
    print(f"serve: gRPC     {server.grpc_url}")
    print(f"serve: metrics  http://{server.metrics_url}/metrics")
    print(f"serve: log      {log}")
    print("serve: Ctrl-C ends it", flush=True)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
