"""The wait for a model that is being unloaded. No server of Triton's."""

import http.server
import threading

import pytest

from support.server import TritonServer


@pytest.mark.parametrize(("status", "ready"), [(200, True), (400, False), (404, False)])
def test_a_model_is_ready_only_if_the_server_says_so(tmp_path, status, ready):
    """24.10 answers 400 for a model that isn't loaded, and newer servers 404."""

    class Answers(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Answers) as stand_in:
        threading.Thread(target=stand_in.serve_forever, daemon=True).start()
        server = TritonServer(tmp_path, http_port=stand_in.server_port)
        server._ports = {"http": stand_in.server_port}
        assert server.is_model_ready("unloaded") is ready
        stand_in.shutdown()
