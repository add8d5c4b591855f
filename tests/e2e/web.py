"""The HTTP servers of the tests, on ports of this machine's own."""

import http.server
import threading


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
