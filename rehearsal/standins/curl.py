"""curl for a machine without one: only the options that the node script uses.

    curl [-s] [-f] [-m SECONDS] [-X METHOD] [-H 'NAME: VALUE']... URL

Exit codes are curl's own: 0, 7 (no connection), 22 (with -f: an HTTP error), 28 (too late).
"""

from __future__ import annotations

import argparse
import sys
import urllib.error
import urllib.request

CONNECT, HTTP, LATE = 7, 22, 28


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="curl", allow_abbrev=False)
    parser.add_argument("-s", action="store_true")
    parser.add_argument("-f", action="store_true")
    parser.add_argument("-m", type=float)
    parser.add_argument("-X", default="GET")
    parser.add_argument("-H", action="append", default=[])
    parser.add_argument("url")
    options = parser.parse_args(words)
    headers = dict(header.split(": ", 1) for header in options.H)
    request = urllib.request.Request(options.url, method=options.X, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=options.m) as answer:
            sys.stdout.buffer.write(answer.read())
    except urllib.error.HTTPError as error:
        if options.f:
            return HTTP
        sys.stdout.buffer.write(error.read())
    except TimeoutError:
        return LATE
    except OSError as error:
        return LATE if isinstance(getattr(error, "reason", None), TimeoutError) else CONNECT
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
