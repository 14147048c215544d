"""An S3 server (moto's) on this machine, whose answers a test may change."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "AKIAABCDEFGHIJKLMNOP",
    "AWS_SECRET_ACCESS_KEY": "a-secret-that-nobody-prints",
    "AWS_DEFAULT_REGION": "us-east-1",
}
Fault = Callable[[dict[str, Any]], "str | None"]


@dataclass
class Server:
    """``fault(environ)`` sees each request ahead of the store: it may wait, change it, or return an error's code."""

    address: str = ""
    fault: Fault = field(default=lambda environ: None)
    requests: list[str] = field(default_factory=list)

    @property
    def environment(self) -> dict[str, str]:
        return {**CREDENTIALS, "AWS_ENDPOINT_URL": self.address, "AWS_MAX_ATTEMPTS": "1"}


def tear(environ: dict[str, Any], keep: int) -> None:
    """Cut a request's body, as if it were whole."""
    body = environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"]))
    for name in [name for name in environ if "CHECKSUM" in name or name in ("HTTP_CONTENT_MD5", "HTTP_X_AMZ_TRAILER")]:
        del environ[name]
    environ["wsgi.input"], environ["CONTENT_LENGTH"] = io.BytesIO(body[:keep]), str(min(keep, len(body)))


@contextmanager
def s3_server(bucket: str) -> Iterator[Server]:
    """Start a server with an empty bucket."""
    import boto3
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import WSGIRequestHandler, make_server

    class Quiet(WSGIRequestHandler):
        protocol_version = "HTTP/1.1"

        def log(self, *_: Any) -> None:
            pass

    store, server = DomainDispatcherApplication(create_backend_app), Server()

    def answer(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        server.requests.append(f"{environ['REQUEST_METHOD']} {environ['PATH_INFO']}?{environ['QUERY_STRING']}")
        code = server.fault(environ)
        if code is None:
            result: Iterable[bytes] = store(environ, start)
            return result
        environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        status = {"InternalError": "500 Error", "SlowDown": "503 Slow Down", "ExpiredToken": "400 Bad Request"}[code]
        message = f"{code}: you signed with {environ.get('HTTP_AUTHORIZATION')}"
        text = f"<Error><Code>{code}</Code><Message>{message}</Message></Error>"
        start(status, [("Content-Type", "application/xml"), ("Content-Length", str(len(text)))])
        return [] if environ["REQUEST_METHOD"] == "HEAD" else [text.encode()]

    listener = make_server("127.0.0.1", 0, answer, threaded=True, request_handler=Quiet)
    server.address = f"http://127.0.0.1:{listener.server_port}"
    thread = threading.Thread(target=listener.serve_forever, daemon=True)
    thread.start()
    keys = {"aws_access_key_id": CREDENTIALS["AWS_ACCESS_KEY_ID"], "aws_secret_access_key": "x"}
    client = boto3.client("s3", endpoint_url=server.address, region_name="us-east-1", **keys)
    client.create_bucket(Bucket=bucket)
    client.close()
    try:
        yield server
    finally:
        listener.shutdown()
        thread.join(30)
        listener.server_close()
