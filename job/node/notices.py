"""Sends a node's messages to the people whom the definition names: that the run trains, that AWS takes the node, that
most of a limit is used up, that the job warns, that the run has ended. While the run trains, this module also postpones
the time at which AWS reports that no node has trained for a long time.

No caller waits longer than WAIT_S for a message, and no message is sent twice; the boot log has the messages that could
not be sent.
"""

from __future__ import annotations

import json
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Collection
from decimal import Decimal
from pathlib import Path
from typing import Any

from gpufleet.job import atomic
from gpufleet.job.contract import terms
from gpufleet.job.contract.aws import SILENCE
from gpufleet.job.contract.gathering import TOLD_S
from gpufleet.job.contract.messages import Alarm, Spent
from gpufleet.job.contract.reading import Fields
from gpufleet.job.contract.spent import hours
from gpufleet.job.contract.workdir import RUN
from gpufleet.job.node.container import secret
from gpufleet.job.node.outside import NOT_REACHED, Objects, ask, bounded, retry, say
from gpufleet.job.node.schedule import Schedule
from gpufleet.job.node.settings import InstanceIdentity, Settings

LOOK_S, MOVE_S = 10, 300
SEND_S, WAIT_S = 30, 20
MOST_SHARE = Decimal("0.8")  # the share of a limit at which a message is sent
TOLD_MOST = "told/most-of-the-cap"  # if this object of the run exists, later nodes do not send the message again
TOLD_ALARM = "told/alarm-"  # an object of the run whose name ends with the kind of the alarm
TOLD_WAITS = "told/waits-"  # an object of the run whose name ends with the time at which the wait began


class Notices:
    """The messages of one node. If the definition names no receiver, no message is sent."""

    def __init__(
        self, settings: Settings, machine: InstanceIdentity, objects: Objects, clock: Callable[[], float]
    ) -> None:
        recipients = json.loads(settings.notify or "{}")
        self._topic, self._webhook = str(recipients.get("topic", "")), str(recipients.get("webhook", ""))
        self._silent_s = float(recipients.get("silent_s", 0))
        group = settings.schedule.partition("/")[0]
        self._silence = Schedule(f"{group}/{SILENCE}" if group and self._topic else "", settings.folder)
        self._settings, self._machine, self._objects, self._clock = settings, machine, objects, clock
        self._folder = Path()
        self._limits: terms.RunLimits | None = None  # None before there is a job
        self._nodes = 1
        self._trained_at, self._moved_at = 0.0, float("-inf")
        self._ended = False
        self._told: set[str] = set()  # keys of messages that were sent already

    def watch(self, workdir: Path, keys: Collection[str]) -> None:
        """Starts a thread that sends messages. `keys` are those of the run's objects when this node booted."""
        if self._topic:
            self._folder = workdir
            money = terms.read(Fields(atomic.read_object(workdir / RUN)))
            self._limits, self._nodes = money.limits, money.nodes
            self._told = set(keys)
            threading.Thread(target=self._watch, name="notices", daemon=True).start()

    def tell(self, event: str) -> None:
        """Sends one message, which names the run, the event, and the money spent."""
        self._briefly(lambda: self._send(event))

    def end(self, event: str) -> None:
        """Sends the last message of the run, and disables the schedule that reports silence."""
        self._ended = True
        self._briefly(lambda: self._end(event))

    def _briefly(self, act: Callable[[], None]) -> None:
        """Calls `act`, and waits for it only for a limited time, because AWS may take minutes to refuse, and the
        machine is about to end.
        """
        if self._topic:
            thread = threading.Thread(target=act, name="message", daemon=True)
            thread.start()
            thread.join(WAIT_S)

    def _end(self, event: str) -> None:
        if not retry(2, self._silence.disable):
            say("the schedule that reports silence cannot be disabled: it sends one more message")
        self._send(event)

    def _send(self, event: str) -> None:
        here, run = self._machine, f"gpufleet {self._settings.stack}, run {self._settings.run}"
        words = f"{run}: {event}. {self._figures()}Node {here.instance}, {here.type} in {here.zone}."
        more = f"What it does now: gpufleet status {self._settings.stack}"
        sent = ask(
            *bounded(SEND_S, "aws", "sns", "publish", "--topic-arn", self._topic, "--output", "text"),
            *(
                "--subject",
                f"{run}: {event}".encode("ascii", "replace").decode()[:100],
                "--message",
                f"{words}\n{more}",
            ),
            *NOT_REACHED,
        )
        if sent.code != 0:
            say("no message could be sent by e-mail")
        if self._webhook and not self._post(f"{words} {more}"):
            say("the webhook has not taken the message")

    def _watch(self) -> None:
        while not self._ended:
            time.sleep(LOOK_S)
            try:
                self._look()
            except OSError as error:  # the disk may be full, but only this thread postpones the report of silence
                say(f"no message could be sent: {error}")

    def _look(self) -> None:
        alarm, spent = Alarm.read(self._folder), Spent.read(self._folder)
        if alarm is not None and alarm.kind.isalnum() and not self._ended:
            self._send_once(TOLD_ALARM + alarm.kind, f"warning: {alarm.text}")
        if spent is None or self._ended:
            return
        if spent.trained_at > self._trained_at:
            began, self._trained_at = not self._trained_at, spent.trained_at
            if self._clock() >= self._moved_at + MOVE_S and self._silence.move(self._clock() + self._silent_s):
                self._moved_at = self._clock()
            if began:
                self._send("it trains" if spent.attempt == 1 else f"it trains on, node {spent.attempt} of the run")
        if spent.waits_since and self._clock() - spent.waits_since >= TOLD_S:
            waits = f"a node has waited for others for {(self._clock() - spent.waits_since) / 60:.0f} minutes, billed"
            self._send_once(f"{TOLD_WAITS}{spent.waits_since:.0f}", waits)
        # If there are several nodes, only one of them sends messages.
        leads = self._nodes == 1 or spent.trained_at > 0 or spent.waits_since > 0
        if leads and (share := self._most(spent)) is not None:
            self._send_once(TOLD_MOST, share)

    def _send_once(self, key: str, event: str) -> None:
        """Sends a message unless the run's objects show that a node has sent it."""
        if key not in self._told:
            self._told.add(key)
            self._send(event)
            file = self._settings.folder / "told"
            file.write_text(event)
            self._objects.put(file, key)

    def _most(self, spent: Spent) -> str | None:
        """The message that most of a limit is used up; None as long as it is not."""
        limits = self._limits
        assert limits is not None
        shares = {"max_usd": spent.spent_usd / limits.max_usd, "max_hours": hours(spent.spent_s) / limits.max_hours}
        name = max(shares, key=lambda limit: shares[limit])
        return f"{shares[name]:.0%} of {name} is used up" if shares[name] >= MOST_SHARE else None

    @property
    def speaks_while_it_waits(self) -> bool:
        """Whether this node is the one, of several waiting nodes, that sends messages."""
        spent = Spent.read(self._folder)
        return spent is not None and spent.waits_since > 0

    def _figures(self) -> str:
        spent, limits = Spent.read(self._folder), self._limits
        if spent is None or limits is None:
            return ""
        usd, billed = f"{spent.spent_usd:.2f} of {limits.max_usd} USD", f"{hours(spent.spent_s):.1f}"
        return f"Spent: {usd}, {billed} of {limits.max_hours} billed hours. "

    def _post(self, text: str) -> bool:
        """Posts a message in the form that Slack and compatible services accept. The URL is a secret, so errors do not
        contain it. If the server has not answered completely after WAIT_S, it is not waited for any longer.
        """
        url = ask(*bounded(SEND_S, *secret(self._webhook)), "--output", "text", *NOT_REACHED)
        taken: list[bool] = []
        if url.code == 0:
            thread = threading.Thread(target=lambda: taken.append(_post(url.out, text)), name="webhook", daemon=True)
            thread.start()
            thread.join(WAIT_S)
        return taken == [True]


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Refuses redirects: a redirected message would become a GET without its text."""

    def redirect_request(self, *_: Any) -> None:
        return None


def _post(url: str, text: str) -> bool:
    try:
        place = urllib.parse.urlsplit(url)
        # Only tests use a server of this kind.
        if place.scheme != "https" and (place.scheme, place.hostname) != ("http", "127.0.0.1"):
            return False
        body, kind = json.dumps({"text": text}).encode(), {"Content-Type": "application/json"}
        asked = urllib.request.Request(url, body, kind, method="POST")
        with urllib.request.build_opener(_NoRedirect).open(asked, timeout=10) as answer:
            return bool(200 <= answer.status < 300)
    except Exception:  # noqa: BLE001 - whatever its server says, and without a word of it
        return False
