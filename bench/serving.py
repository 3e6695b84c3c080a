"""Measures the characters per second of the server over HTTP, for a model's shape and random weights:

    python bench/serving.py [--layers 44] [--width 2816] [--characters 200] [--clients 1 4]

The server is pretrain-d64's own, but reads no folder. Beside each figure the program prints the bound that follows from
the GPU's data sheet, because each character reads every weight once. On a CPU this only shows that the program runs:
give it few layers and a narrow width.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from statistics import median
from typing import Any

import torch

from gpufleet.job.experiments.engine import device
from gpufleet.job.experiments.pretrain.model import CharGpt
from gpufleet.job.experiments.pretrain.serve.batch import TextWriter
from gpufleet.job.experiments.pretrain.serve.model import Served
from gpufleet.job.experiments.pretrain.serve.server import Server
from gpufleet.job.experiments.pretrain.spec import PretrainConfig

REQUESTS = 3  # requests of each client, one after another, after a first request that is not counted


def main() -> None:
    """A line for each number of clients."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("layers", 44), ("width", 2816), ("characters", 200)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4])
    a = parser.parse_args()
    config = PretrainConfig()
    found = device.choose("cuda" if torch.cuda.is_available() else "cpu", bf16=False)
    with torch.device("meta"):
        module = CharGpt(replace(config.model, layers=a.layers, width=a.width))
    module.to_empty(device=found.torch).eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0.0, 0.02)
    if found.torch.type == "cuda":  # as in `open_model`
        module.compute_dtype = torch.bfloat16
        module.to(torch.bfloat16)
    window = config.data.sequence
    served = Served(module=module, name="random weights", sequence=window, meta={}, writer=TextWriter(module, window))
    server = Server(("127.0.0.1", 0), served)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        url = f"http://127.0.0.1:{server.address[1]}"
        say(f"{found.banner()}\n{ask(f'{url}/info')}")
        weights = sum(parameter.nbytes for parameter in module.parameters())
        bandwidth = device.bandwidth_gb_s(found.name)
        most = f", by the data sheet {bandwidth * 1e9 / weights:,.0f} at most for one" if bandwidth else ""
        asked = {"prompt": "123+456", "max_tokens": a.characters, "seed": 1}
        for clients in a.clients:
            ask(f"{url}/generate", asked)
            with ThreadPoolExecutor(clients) as pool:
                began = time.perf_counter()
                took = list(pool.map(lambda _: seconds(f"{url}/generate", asked), range(clients * REQUESTS)))
                each_s = time.perf_counter() - began
            say(
                f"{clients} at once: {a.characters * len(took) / each_s:,.1f} characters/s in all, "
                f"{a.characters / median(took):,.1f} for one client{most}; {weights / 1e9:.1f} GB of weights"
            )
    finally:
        server.should_exit = True
        thread.join()


def seconds(url: str, body: dict[str, Any]) -> float:
    """The seconds until the whole answer has arrived."""
    began = time.perf_counter()
    ask(url, body)
    return time.perf_counter() - began


def ask(url: str, body: dict[str, Any] | None = None) -> Any:
    """The answer, as JSON."""
    request = urllib.request.Request(url, data=None if body is None else json.dumps(body).encode())
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
