"""A server as `ServerWorker` starts them: answers /health, has a child process and a block of shared memory, and ends when asked to.

    health_server.py [--never-ready | --fail] --host HOST --port PORT
"""

import argparse
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from multiprocessing.shared_memory import SharedMemory


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = f"{child.pid} {memory.name}".encode()
        self.send_response(503 if options.never_ready else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


parser = argparse.ArgumentParser()
parser.add_argument("--never-ready", action="store_true")
parser.add_argument("--fail", action="store_true")
parser.add_argument("--host")
parser.add_argument("--port", type=int)
options = parser.parse_args()
if options.fail:
    sys.exit("RuntimeError: this model is unknown")
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
memory = SharedMemory(create=True, size=4096)
HTTPServer((options.host, options.port), Handler).serve_forever()
