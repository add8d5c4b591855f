"""The servers of the tests, on ports of this machine's own."""

import contextlib
import http.server
import os
import re
import socket
import ssl
import subprocess
import tempfile
import threading

from support import until

PLAIN = """
version: 0.1
log: {level: error, accesslog: {disabled: true}}
storage:
  filesystem: {rootdirectory: "%s"}
  maintenance: {readonly: {enabled: %s}}
http: {addr: "127.0.0.1:%d", relativeurls: true}
"""


class WebServer(http.server.ThreadingHTTPServer):
    """A server for the length of a with block; with TLS, if it gets a context."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, handler, context=None):
        super().__init__(("127.0.0.1", 0), handler)
        # What the handlers of several connections change.
        self.lock = threading.Lock()
        if context is not None:
            self.socket = context.wrap_socket(self.socket, server_side=True,
                                              do_handshake_on_connect=False)
        self.scheme = "http" if context is None else "https"

    def handle_error(self, *_):
        # A client that ends, or refuses the certificate, closes its connection.
        pass

    def __enter__(self):
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_):
        self.shutdown()
        self.server_close()


class Handler(http.server.BaseHTTPRequestHandler):
    """Sends answers, and logs nothing."""

    protocol_version = "HTTP/1.1"
    timeout = 60

    def asked_range(self, size):
        """The first and last byte of the range that is asked for, in a content of this size; None
        if the whole content is."""
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        return asked and (int(asked[1]), min(int(asked[2]), size - 1))

    def answer(self, status, data, headers=None, cut=None, length=None):
        """Sends an answer; closes the connection after `cut` bytes of its body."""
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data) if length is None else length))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data if cut is None else data[:cut])
        if cut is not None:
            self.wfile.flush()
            self.close_connection = True

    def send_content(self, data, cut=None):
        """Sends the data, or the range of them that is asked for."""
        if asked := self.asked_range(len(data)):
            first, last = asked
            headers = {"Content-Range": f"bytes {first}-{last}/{len(data)}"}
            self.answer(206, data[first:last + 1], headers, cut)
        else:
            self.answer(200, data, cut=cut)

    def log_message(self, *_):
        pass


def tls(directory):
    """The context of a server with the certificate of `make_certificates`."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*(os.path.join(directory, f"leaf.{end}") for end in ("pem", "key")))
    return context


def free_port():
    """A port on which no program listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@contextlib.contextmanager
def listening(port, *command, env=None):
    """Runs a program that listens on the port, for the length of a with block."""
    with tempfile.TemporaryFile() as log:
        server = subprocess.Popen(command, env={**os.environ, **(env or {})},
                                  stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            def answers():
                if server.poll() is not None:
                    log.seek(0)
                    raise AssertionError(f"{command[0]} ended: {log.read().decode()}")
                with socket.socket() as probe:
                    return probe.connect_ex(("127.0.0.1", port)) == 0
            until(answers, f"{command[0]} answers", 30)
            yield
        finally:
            server.kill()
            server.wait(30)


@contextlib.contextmanager
def plain_registry(directory, read_only=False):
    """The port of a docker-registry without TLS, which names uploads by relative URLs."""
    port = free_port()
    config = os.path.join(directory, f"plain-{port}.yml")
    with open(config, "w") as out:
        storage = os.path.join(directory, f"plain-{port}")
        out.write(PLAIN % (storage, "true" if read_only else "false", port))
    with listening(port, "docker-registry", "serve", config):
        yield port
