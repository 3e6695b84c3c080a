"""`gpufleet report STACK`: writes one HTML file about an ended run, for any browser, without a network. For a campaign,
the file is about all ended runs, and another file beside it has their figures and receipts for programs.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from gpufleet.infra.account import aws, campaign_bucket
from gpufleet.infra.account.campaign_records import CampaignRecords
from gpufleet.infra.commands import stack
from gpufleet.infra.commands.trials import results_folder
from gpufleet.infra.definition import campaign as campaigns
from gpufleet.infra.definition.campaign import CampaignFile
from gpufleet.infra.definition.loader import names_of, project_root
from gpufleet.infra.errors import GpufleetError
from gpufleet.infra.report import campaign as campaign_report
from gpufleet.infra.report import run as report
from gpufleet.infra.report.run import NAME
from gpufleet.job import atomic
from gpufleet.job.contract.workdir import RECEIPT


def arguments(parser: argparse.ArgumentParser) -> None:
    stack.argument(parser, earlier_runs=True)
    parser.add_argument("--of", type=Path, metavar="DIR", help="a run's results; default: the newest of this run here")
    parser.add_argument("--to", type=Path, metavar="FILE", help=f"default: {NAME} beside the results")


def run(args: argparse.Namespace) -> int:
    """Writes the page and prints where it is."""
    root = project_root(Path.cwd())
    if campaigns.path_of(args.stack, root) and args.stack not in names_of(root):
        described = campaigns.load(args.stack, root)
        folder = args.of or _brought(described, root)
        runs = campaign_report.read(described, folder)
        page = campaign_report.html(runs)
        _write(folder / campaign_report.FIGURES, atomic.json_bytes(runs.to_json()))
    else:
        definition = stack.definition_of(args)
        folder = args.of or _newest(root, definition.name, definition.run.id)
        page = report.html(report.read(folder))
    target = args.to or folder / NAME
    if not target.parent.is_dir():
        raise GpufleetError(f"--to {target}: there is no folder {target.parent}; make it, or write elsewhere")
    _write(target, page.encode())
    return 0


def _write(target: Path, content: bytes) -> None:
    atomic.write_bytes(target, content)
    print(f"Written: {target}")


def _brought(described: CampaignFile, root: Path) -> Path:
    """The folder of the campaign's documents, after the documents in its bucket were added to it. If there is no
    bucket, as after `gpufleet campaign NAME --forget`, nothing is added.
    """
    folder = results_folder(described, root)
    first = campaigns.trials(described, root)[:1]
    campaigns.write(first, root)
    region = stack.definition_of(argparse.Namespace(stack=first[0].name)).fleet.region
    ledger = campaign_bucket.find_ledger(aws.client, described.name, region)
    if ledger is not None:
        CampaignRecords(store=ledger.store).bring(folder)
    return folder


def _newest(root: Path, name: str, run_id: str) -> Path:
    """The folder with the run's results: that of `gpufleet results` or that of a rehearsal, whichever is newer."""
    places = (root / "results" / name / run_id, root / "rehearsals" / name / run_id / "results")
    there = [place for place in places if (place / RECEIPT).is_file()]
    if not there:
        raise GpufleetError(
            f"there are no results of {name}, run {run_id}, here: `gpufleet results {name}` downloads the results of a "
            f"run that has ended, `gpufleet rehearse {name}` makes new ones"
        )
    return max(there, key=lambda place: (place / RECEIPT).stat().st_mtime)
