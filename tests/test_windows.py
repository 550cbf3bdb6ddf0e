"""On Windows, `import litft` works, and a command says what to do."""

import subprocess
import sys

from conftest import ENV, ROOT

# modules of Python that Windows lacks, and its name; what Python itself imports comes first
PRETEND = """
import sys, signal, subprocess, multiprocessing, jsonargparse, rich.console, yaml, tqdm
for name in ("fcntl", "resource", "termios", "tty", "pwd", "grp"):
    sys.modules[name] = None
del signal.SIGUSR1
sys.platform = "win32"
"""


def on_windows(code):
    command = [sys.executable, "-c", PRETEND + code]
    return subprocess.run(command, cwd=ROOT, env=ENV, capture_output=True, text=True)


def test_a_command_names_wsl():
    done = on_windows("from litft.cli import run; run('finetune lora', [])")
    assert done.returncode == 2
    assert done.stderr.startswith("error: litft does not run on Windows itself")
    assert "wsl --install" in done.stderr and "Traceback" not in done.stderr


def test_the_list_of_commands_is_printed():
    done = on_windows("sys.argv = ['litft', '--help']; from litft.cli import main; main()")
    assert done.returncode == 0 and "litft finetune lora" in done.stdout


def test_the_library_is_imported_and_says_what_is_missing():
    done = on_windows("""
import litft
try:
    litft.load
except OSError as error:
    print(error)
""")
    assert "install WSL" in done.stdout, done.stderr
