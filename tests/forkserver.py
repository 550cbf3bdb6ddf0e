"""Start the commands under test in milliseconds: a server that has imported torch and litft forks a
process for each.

Importing torch and Lightning takes three to six seconds of CPU time, most of what a short command
needs. A forked process runs the same script with its own arguments, folder, environment and files,
and ends as a fresh interpreter would. Tests of imports, of installation and of environment
variables that are read at import time start a real interpreter instead.

`python forkserver.py serve SOCKET PID` is the server; it ends with the process PID. `bin/python`
next to the socket replaces `python` where a shell, Fabric or torchrun starts a script: it asks the
server to fork, and forwards signals to the process.
"""

import atexit
import fcntl
import gc
import io
import json
import os
import runpy
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path

SOCKET = "LITFT_TEST_FORKSERVER"  # the environment variable with the socket's path
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
PYTHON = f"""#!{sys.executable} -SE
import os, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
words = [word for word in sys.argv[1:] if word != "-u"]  # which torchrun adds
if words and words[0].endswith(".py"):
    import forkserver
    forkserver.stand_in(words)
os.execv({sys.executable!r}, [{sys.executable!r}, *sys.argv[1:]])
"""


def prepare() -> Path:
    """Choose a socket for this process and those it starts, write `bin/python` next to it, and
    return the folder."""
    if SOCKET not in os.environ:
        folder = Path(tempfile.mkdtemp(prefix="litft-forks-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        os.environ[SOCKET] = f"{folder}/owner-{os.getpid()}"
        (folder / "bin").mkdir()
        (folder / "bin" / "python").write_text(PYTHON)
        (folder / "bin" / "python").chmod(0o755)
    return Path(os.environ[SOCKET]).parent


class Process:
    """A forked command with the interface of `subprocess.Popen`; a stream is None (/dev/null), PIPE
    or an open file."""

    def __init__(
        self,
        argv: list[str],
        cwd: str | Path,
        env: dict[str, str],
        stdin=None,
        stdout=None,
        stderr=None,
    ) -> None:
        self.args, self.returncode = argv, None
        self.stdin = self.stdout = self.stderr = None
        self._connection = _connect(env[SOCKET])
        with ExitStack() as stack:
            streams = {"stdin": stdin, "stdout": stdout, "stderr": stderr}
            files = [self._descriptor(name, file, stack) for name, file in streams.items()]
            request = json.dumps({"argv": argv, "cwd": str(cwd), "env": env}).encode()
            socket.send_fds(self._connection, [len(request).to_bytes(4, "big")], files)
            self._connection.sendall(request)
        self._lines = self._connection.makefile()
        self.pid = int(self._lines.readline())

    def _descriptor(self, name: str, file, stack: ExitStack) -> int:
        """Return the file descriptor for the forked process; of a pipe, this object keeps the other
        end."""
        if file == subprocess.PIPE:
            ends = os.pipe()
            parent_end, child_end = (ends[1], ends[0]) if name == "stdin" else ends
            setattr(
                self,
                name,
                os.fdopen(parent_end, "w" if name == "stdin" else "r", errors="replace"),
            )
            stack.callback(os.close, child_end)
            return child_end
        if file is None:
            return stack.enter_context(open(os.devnull, "r+b", buffering=0)).fileno()
        return file if isinstance(file, int) else file.fileno()

    def communicate(self, text: str = "", timeout: float | None = None) -> tuple[str, str]:
        """Write text to stdin, wait for the end, and return stdout and stderr (empty unless they
        are pipes)."""
        if self.stdin is not None:
            with suppress(BrokenPipeError), self.stdin:
                self.stdin.write(text)
        outputs = {}
        readers = [
            threading.Thread(
                target=lambda name, file: outputs.update({name: file.read()}),
                args=(name, file),
                daemon=True,
            )
            for name, file in (("stdout", self.stdout), ("stderr", self.stderr))
            if file is not None
        ]
        for reader in readers:
            reader.start()
        self.wait(timeout)
        for reader in readers:
            reader.join()
        return outputs.get("stdout", ""), outputs.get("stderr", "")

    def poll(self) -> int | None:
        """Return the exit code (negative for a signal), or None while the process runs."""
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code; raise subprocess.TimeoutExpired after `timeout` seconds."""
        if self.returncode is None:
            with selectors.DefaultSelector() as selector:
                selector.register(self._connection, selectors.EVENT_READ)
                if not selector.select(timeout):
                    raise subprocess.TimeoutExpired(self.args, timeout)
            self.returncode = int(self._lines.readline())
            self._connection.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal to the process."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End the process at once."""
        self.send_signal(signal.SIGKILL)


def _connect(path: str) -> socket.socket:
    """Return a connection to the server; the first caller starts the server."""
    with open(f"{path}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not os.path.exists(path):
            owner = path.rpartition("-")[2]  # the process that chose the path
            command = [sys.executable, __file__, "serve", path, owner]
            # readers of the caller's output would wait for the server's end
            with open(f"{path}.log", "w") as log:
                files = dict(stdin=subprocess.DEVNULL, stdout=log, stderr=log)
                server = subprocess.Popen(command, **files, start_new_session=True)
            while not os.path.exists(path):
                assert server.poll() is None, Path(f"{path}.log").read_text()
                time.sleep(0.02)
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    return connection


def preload() -> None:
    """Import what the commands import, and build their parsers; nothing that reads the environment
    at import time."""
    # Fabric imports it if it is installed, and it imports transformers
    sys.modules["torchmetrics"] = None
    import lightning_fabric.strategies  # noqa: F401

    del sys.modules["torchmetrics"]
    import torch.distributed.checkpoint
    import torch.distributed.fsdp
    import torch.distributed.tensor

    import litft.cli
    import litft.commands.chat
    import litft.commands.convert_hf_checkpoint
    import litft.commands.convert_to_hf
    import litft.commands.finetune
    import litft.commands.generate
    import litft.commands.merge_lora
    import litft.commands.run_eval
    import litft.families
    from litft.args.parser import parser_of
    from litft.families import families
    from litft.model.quantization import bitsandbytes
    from litft.training.memory.flops import peak_flops

    bitsandbytes()
    families()
    for command in litft.cli.COMMANDS.values():
        parser_of(command.args)
    torch.set_num_threads(1)  # OpenMP's threads would not survive the fork
    peak_flops(torch.device("cpu"), "fp32")


class Server:
    """Forks a process for each connection and reports its exit code."""

    def __init__(self, path: str, owner: int) -> None:
        self.selector = selectors.DefaultSelector()
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(f"{path}.new")
        self.listener.listen(64)
        self.selector.register(self.listener, selectors.EVENT_READ, self.accept)
        self.owner = os.pidfd_open(owner)
        self.selector.register(self.owner, selectors.EVENT_READ, lambda: sys.exit(0))
        self.request: dict | None = None  # set in a forked process: the command it runs
        os.rename(f"{path}.new", path)

    def run(self) -> dict:
        """Serve clients; in a forked process, return its request."""
        while self.request is None:
            for key, _ in self.selector.select():
                # otherwise an earlier callback of this round has removed it
                if key.fd in self.selector.get_map():
                    key.data()
                if self.request is not None:
                    break
        return self.request

    def accept(self) -> None:
        """Fork a process for a client."""
        connection, _ = self.listener.accept()
        size, files, *_ = socket.recv_fds(connection, 4, 3)
        request = json.loads(connection.makefile("rb").read(int.from_bytes(size, "big")))
        pid = os.fork()
        if pid == 0:  # close the files and connections of the server and of other processes
            for key in list(self.selector.get_map().values()):
                os.close(key.fileobj) if isinstance(
                    key.fileobj, int
                ) else key.fileobj.close()
            self.selector.close()
            connection.close()
            self.request = request | {"files": files}
            return
        for file in files:
            os.close(file)
        connection.sendall(f"{pid}\n".encode())
        pidfd = os.pidfd_open(pid)
        self.selector.register(
            pidfd, selectors.EVENT_READ, lambda: self.report(pid, pidfd, connection)
        )
        self.selector.register(
            connection, selectors.EVENT_READ, lambda: self.hang_up(pid, connection)
        )

    def report(self, pid: int, pidfd: int, connection: socket.socket) -> None:
        """Send the exit code to the client."""
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        self.selector.unregister(pidfd)
        os.close(pidfd)
        if connection.fileno() in self.selector.get_map():
            self.selector.unregister(connection)
            connection.sendall(f"{code}\n".encode())
        connection.close()

    def hang_up(self, pid: int, connection: socket.socket) -> None:
        """Kill the process of a client that has closed its connection."""
        self.selector.unregister(connection)
        os.kill(pid, signal.SIGKILL)


def become(request: dict) -> None:
    """Apply a request's files, folder, environment and arguments to this process, as in a fresh
    interpreter."""
    os.setsid()
    for target, file in enumerate(request["files"]):
        os.dup2(file, target)
        os.close(file)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)))
    sys.stdout.reconfigure(line_buffering=sys.stdout.isatty())
    sys.argv = request["argv"]
    sys.executable = str(Path(os.environ[SOCKET]).parent / "bin" / "python")
    sys.path[:1] = [
        str(Path(sys.argv[0]).resolve().parent),
        *filter(None, os.environ.get("PYTHONPATH", "").split(":")),
    ]
    if (threads := os.environ.get("OMP_NUM_THREADS")) is not None:
        import torch

        torch.set_num_threads(int(threads))


def run_and_exit(script: str) -> None:
    """Run a script and exit like the interpreter, but without its teardown, which takes over a
    second with torch loaded."""
    code, interrupted = 0, False
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as exit_request:
        code = (
            exit_request.code
            if isinstance(exit_request.code, int)
            else int(exit_request.code is not None)
        )
        if code and not isinstance(exit_request.code, int):
            print(exit_request.code, file=sys.stderr)
    except BaseException as error:
        sys.excepthook(*sys.exc_info())
        code, interrupted = 1, isinstance(error, KeyboardInterrupt)
    threading._shutdown()  # waits for non-daemon threads
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError) as error:
            os.write(
                2, f"Exception ignored while flushing {stream.name}: {error!r}\n".encode()
            )
            code = 120
    if interrupted:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code)


def stand_in(argv: list[str]) -> None:
    """Run a script in place of `python`, and exit with its exit code or signal."""
    process = Process(argv, os.getcwd(), dict(os.environ), 0, 1, 2)
    for number in FORWARDED:
        signal.signal(number, lambda number, _: process.send_signal(number))
    code = process.wait()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    preload()
    gc.collect()
    gc.freeze()
    become(Server(sys.argv[2], int(sys.argv[3])).run())
    run_and_exit(sys.argv[0])
