"""A local hub: answers huggingface_hub's requests to huggingface.co from memory, on a local
port."""

import base64
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class Hub:
    """Serve models from memory.

    Entering the context starts the server; `requests` lists what was requested.
    """

    def __init__(self, **models: Path) -> None:
        self.models = {f"me/{name}": files_of(folder) for name, folder in models.items()}
        self.gated: set[str] = set()
        self.sizes: dict[str, int] = {}  # reported sizes that differ from the content's
        # number of bytes after which a file's next download breaks off
        self.cut: dict[str, int] = {}
        self.down_after: str | None = (
            None  # the file whose broken download takes the hub down
        )
        self.is_down = False  # closes every connection without a response
        self.requests: list[str] = []
        # the response to every request about a model; None: the real one
        self.response: object = None
        self.private: dict[str, bool] = {}

    def commit(self, name: str) -> str:
        """Return the newest commit of a model."""
        content = [
            (file, hashlib.sha1(data).hexdigest())
            for file, data in sorted(self.models[name].items())
        ]
        return hashlib.sha1(json.dumps(content).encode()).hexdigest()

    def __enter__(self) -> "Hub":
        self.server = ThreadingHTTPServer(
            ("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self})
        )
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_) -> None:
        self.server.shutdown()
        self.server.server_close()

    def env(self, home: Path) -> dict[str, str]:
        """Return the environment in which huggingface_hub uses this hub, with its cache in
        `home`."""
        return {
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(home),
            "HF_HUB_DISABLE_PROGRESS_BARS": "0",
            "HF_HUB_OFFLINE": "0",
        }


def files_of(folder: Path) -> dict[str, bytes]:
    """Return the content of a folder's files by name."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_) -> None:
        pass

    def do_GET(self) -> None:
        if self.hub.is_down:
            self.close_connection = True
            return None
        path, _, _ = self.path.partition("?")
        span = self.headers.get("Range")
        self.hub.requests.append(f"{self.command} {path}{f' {span}' if span else ''}")
        if path.startswith("/api/models/"):
            return self.answer_api(path.split("/")[3:])
        if path.startswith("/api/datasets/"):
            return self.send(
                200, {"id": "me/data", "sha": "d" * 40, "siblings": [], "tags": []}
            )
        if "/resolve/" not in path:
            return self.send(404)
        owner, name, _, revision, *file = path.strip("/").split("/")
        return self.answer_file(f"{owner}/{name}", revision, "/".join(file))

    do_HEAD = do_GET

    def answer_api(self, parts: list[str]) -> None:
        name = "/".join(parts[:2])
        if self.hub.response is not None:
            return self.send(200, self.hub.response)
        if name not in self.hub.models:
            return self.send(401, **{"X-Error-Code": "RepoNotFound"})
        if name in self.hub.gated:
            return self.send(403, **{"X-Error-Code": "GatedRepo"})
        commit, files = self.hub.commit(name), self.hub.models[name]
        if len(parts) > 3 and parts[3] not in ("main", commit):
            return self.send(404, **{"X-Error-Code": "RevisionNotFound"})
        sizes = {file: self.hub.sizes.get(file, len(data)) for file, data in files.items()}
        if parts[2:3] == ["tree"]:
            entries = [
                {"type": "file", "path": f, "size": n, "oid": "0" * 40}
                for f, n in sizes.items()
            ]
            return self.send(200, entries)
        siblings = [{"rfilename": file, "size": size} for file, size in sizes.items()]
        return self.send(200, {"id": name, "sha": commit, "siblings": siblings, "tags": []})

    def answer_file(self, name: str, revision: str, file: str) -> None:
        data = self.hub.models.get(name, {}).get(file)
        if data is None:
            return self.send(404, **{"X-Error-Code": "EntryNotFound"})
        headers = {
            "ETag": f'"{hashlib.sha1(data).hexdigest()}"',
            "X-Repo-Commit": self.hub.commit(name),
        }
        start = int((self.headers.get("Range") or "bytes=0-").split("=")[1].split("-")[0])
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        end = self.hub.cut.pop(file, None) if self.command == "GET" else None
        self.hub.is_down = end is not None and file == self.hub.down_after
        return self.send(206 if start else 200, data[start:], end=end, **headers)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.hub.requests.append(f"POST {self.path}")
        parts = self.path.partition("?")[0].split("/")[2:]
        if parts == ["repos", "create"]:
            request = json.loads(body)
            name = f"{request.get('organization') or 'me'}/{request['name']}"
            self.hub.models.setdefault(name, {})
            self.hub.private[name] = request.get(
                "private", request.get("visibility") == "private"
            )
            return self.send(200, {"url": f"{self.hub.url}/{name}", "id": name})
        if parts == ["validate-yaml"]:
            return self.send(200, {"errors": [], "warnings": []})
        name = "/".join(parts[1:3])
        if parts[3] == "preupload":
            files = [
                {"path": f["path"], "uploadMode": "regular", "shouldIgnore": False}
                for f in json.loads(body)["files"]
            ]
            return self.send(200, {"files": files})
        for line in filter(None, body.split(b"\n")):
            entry = json.loads(line)
            if entry["key"] == "file":
                self.hub.models[name][entry["value"]["path"]] = base64.b64decode(
                    entry["value"]["content"]
                )
        return self.send(
            200,
            {
                "commitUrl": f"{self.hub.url}/{name}/commit/1",
                "commitOid": "1" * 40,
                "success": True,
            },
        )

    def send(self, code: int, content=b"", end: int | None = None, **headers: str) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(code)
        for key, value in {
            "Content-Type": "application/json",
            **headers,
            "Content-Length": str(len(data)),
        }.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data[:end])
        if end is not None:
            self.close_connection = True
