"""A hub of models on this machine: the endpoints that `huggingface_hub` calls to send files and to fetch the newest."""

import base64
import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

TOKEN = "hf_of-the-test"
COMMIT = "c" * 40


@dataclass
class Hub:
    """What the hub was sent, and how it answers.

    Attributes:
        refuse: status with which everything is refused; 0 refuses nothing.
        created: bodies of the calls that created repositories.
        branches: names of branches by repository, besides main.
        commits: for each commit its branch, its summary and its files. The files of the newest are those of every repository.
    """

    url: str = ""
    refuse: int = 0
    created: list[dict[str, Any]] = field(default_factory=list)
    branches: dict[str, list[str]] = field(default_factory=dict)
    commits: list[tuple[str, str, dict[str, bytes]]] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    blobs: dict[str, bytes] = field(default_factory=dict)

    def environment(self, home: Path) -> dict[str, str]:
        """Return an environment in which this hub is the only one, with an empty cache in `home`."""
        return os.environ | {
            "HF_ENDPOINT": self.url, "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0", "HF_DATASETS_OFFLINE": "0",
            "HF_HOME": str(home)}


@contextmanager
def serving_hub() -> Iterator[Hub]:
    """Serve a hub on a free port."""
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            pass

        def do_PUT(self) -> None:
            body = self._body()
            hub.blobs[self.path.rpartition("/")[2]] = body
            self._answer(200, {})

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            hub.requests.append(self.path)
            if self.headers["authorization"] != f"Bearer {TOKEN}":
                return self._answer(401, {"error": "Invalid username or password."})
            files = hub.commits[-1][2] if hub.commits else {}
            parts = self.path.partition("?")[0].strip("/").removeprefix("datasets/").split("/")
            if files and parts[:1] == ["api"] and parts[4:5] in ([], ["revision"]):
                siblings = [{"rfilename": name} for name in sorted(files)]
                return self._answer(200, {"id": "/".join(parts[2:4]), "sha": COMMIT, "siblings": siblings})
            if parts[:1] == ["api"] and parts[4:5] == ["tree"]:
                blobs = {name: {"oid": sha256(content).hexdigest()[:40], "size": len(content)} for name, content in files.items()}
                return self._answer(200, [{"type": "file", "path": name} | blob for name, blob in sorted(blobs.items())])
            if parts[2:3] == ["resolve"] and "/".join(parts[4:]) in files:
                content = files["/".join(parts[4:])]
                headers = {"ETag": f'"{sha256(content).hexdigest()}"', "X-Repo-Commit": COMMIT}
                return self._send(200, content, "application/octet-stream", headers)
            return self._send(404, b"", "text/plain", {"X-Error-Code": "EntryNotFound"})

        def do_POST(self) -> None:
            hub.requests.append(self.path)
            body = self._body()
            if self.headers["authorization"] != f"Bearer {TOKEN}":
                return self._answer(401, {"error": "Invalid credentials in Authorization header"})
            if hub.refuse:
                return self._answer(hub.refuse, {"error": "the owner says no"})
            parts = self.path.strip("/").split("/")
            if self.path.endswith("/commit/" + parts[-1]):
                return self._commit("/".join(parts[2:4]), parts[-1], body)
            given = json.loads(body or b"{}")
            if self.path == "/api/repos/create":
                return self._create(given)
            if self.path == "/api/validate-yaml":
                return self._answer(200, {"warnings": [], "errors": []})
            if parts[4:5] == ["branch"]:
                hub.branches.setdefault("/".join(parts[2:4]), []).append(parts[5])
                return self._answer(200, {})
            if parts[4:5] == ["preupload"]:
                modes = {each["path"]: "lfs" if each["path"].endswith(".safetensors") else "regular" for each in given["files"]}
                files = [{"path": path, "uploadMode": mode, "shouldIgnore": False} for path, mode in modes.items()]
                return self._answer(200, {"files": files})
            if self.path.endswith("/objects/batch"):
                return self._answer(200, {"transfer": "basic", "objects": [
                    each | {"actions": {"upload": {"href": f"{hub.url}/blobs/{each['oid']}"}}} for each in given["objects"]]})
            return self._answer(404, {"error": f"the hub of the tests has no {self.path}"})

        def _create(self, given: dict[str, Any]) -> None:
            name = f"{given['organization']}/{given['name']}"
            exists = any(each["organization"] == given["organization"] and each["name"] == given["name"] for each in hub.created)
            if not exists:
                hub.created.append(given)
            self._answer(409 if exists else 200, {"url": f"{hub.url}/{name}", "error": "You already created this model repo"})

        def _commit(self, repo_id: str, branch: str, body: bytes) -> None:
            lines = [json.loads(line) for line in body.splitlines()]
            files, summary = {}, ""
            for line in lines:
                value = line["value"]
                if line["key"] == "header":
                    summary = value["summary"]
                elif line["key"] == "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                else:
                    files[value["path"]] = hub.blobs[value["oid"]]
                    assert sha256(files[value["path"]]).hexdigest() == value["oid"] and len(files[value["path"]]) == value["size"]
            hub.commits.append((branch, summary, files))
            self._answer(200, {"commitUrl": f"{hub.url}/{repo_id}/commit/{len(hub.commits)}", "commitOid": str(len(hub.commits))})

        def _body(self) -> bytes:
            if self.headers.get("transfer-encoding") != "chunked":
                return self.rfile.read(int(self.headers["content-length"] or 0))
            body = b""
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return body

        def _answer(self, status: int, content: Any) -> None:
            self._send(status, json.dumps(content).encode(), "application/json", {})

        def _send(self, status: int, body: bytes, kind: str, headers: dict[str, str]) -> None:
            self.send_response(status)
            for name, value in (headers | {"content-type": kind, "content-length": str(len(body))}).items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
