"""List the runs under a folder with method, model, steps, loss and state.

python scripts/runs.py --folder out
"""

from litft.cli import run

if __name__ == "__main__":
    run("runs")
