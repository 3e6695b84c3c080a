"""`python -m gpufleet.job.experiments.pretrain.serve DIR --port 8000`: serves the model in DIR, which is the final/ of
a run, over HTTP. By default only this machine can reach the server, because there is no password; --host changes this.
SIGTERM and Ctrl-C end the server.
"""

from __future__ import annotations

import argparse
import errno
import socket
import sys
from collections.abc import Sequence
from pathlib import Path


def main(argv: Sequence[str] | None = None) -> int:
    """Serves until a signal ends the server. Returns 2 if there is nothing to serve, or the port is taken."""
    parser = argparse.ArgumentParser(prog="python -m gpufleet.job.experiments.pretrain.serve", description=__doc__)
    parser.add_argument("folder", metavar="DIR", type=Path, help="model.safetensors and meta.json, a run's final/")
    parser.add_argument("--port", type=int, default=8000, help="0 takes a free one (default: %(default)s)")
    parser.add_argument("--host", default="127.0.0.1", help="0.0.0.0 opens it to the network (default: %(default)s)")
    parser.add_argument("--device", help="cuda or cpu (default: cuda if there is one)")
    args = parser.parse_args(argv)
    if not args.host:  # the variable may be unset; for a socket, an empty text would mean every address
        parser.error("--host is empty; 127.0.0.1 serves only this machine, 0.0.0.0 also the network")
    try:
        import torch  # takes seconds; imported here, so that --help does not need it, and Ctrl-C works meanwhile

        from gpufleet.job.experiments.pretrain.serve.model import open_model
        from gpufleet.job.experiments.pretrain.serve.server import Server

        served = open_model(args.folder, device=args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    except KeyboardInterrupt:  # Ctrl-C may come while 16 GB are hashed and loaded, which takes half a minute
        return 0
    except ImportError as error:
        sys.stderr.write(f"the server needs a package that is missing ({error}): pip install 'gpufleet[job,serve]'\n")
        return 2
    except (ValueError, OSError, RuntimeError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    try:
        server = Server((args.host, args.port), served)
    except (OSError, OverflowError) as error:
        sys.stderr.write(f"{refusal(args.host, args.port, error)}\n")
        return 2

    host, port = server.address
    sys.stdout.write(f"{served.name} on http://{host}:{port} (GET /health, GET /info, POST /generate)\n")
    sys.stdout.flush()
    server.serve_forever()
    return 0


def refusal(host: str, port: int, error: OSError | OverflowError) -> str:
    """A sentence about a problem with --host or --port, and what to use instead."""
    if isinstance(error, OverflowError):
        return f"--port {port}: 0 to 65535 are allowed; 0 takes a free one"
    why = error.strerror or str(error)
    if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
        return (
            f"--host {host}: no IPv4 address of this machine ({why}); 127.0.0.1 serves only this machine, 0.0.0.0 also"
            " the network"
        )
    if error.errno == errno.EADDRINUSE:
        return f"--port {port} on {host} is in use; --port 0 takes a free one"
    return f"--port {port} on {host}: {why}; --port 0 takes a free one"


if __name__ == "__main__":
    sys.exit(main())
