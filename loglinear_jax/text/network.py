"""Whether a server answers, found out in a few seconds."""

from __future__ import annotations

import threading

import requests

STEP_SECONDS = 1.5  # to connect, and to answer
ALL_SECONDS = 3  # for both, and for finding the address


class NoAnswer(Exception):
    """A server that can't be reached."""


def check_answers(url: str) -> None:
    """Raises NoAnswer if nothing answers there in time. What it answers, and who it is, is left to the download to judge.

    The libraries that download try for minutes before they say so.
    """
    found: list[Exception | None] = []

    def ask() -> None:
        try:
            requests.head(url, timeout=STEP_SECONDS).close()
        except requests.exceptions.SSLError:  # somebody is there
            found.append(None)
        except requests.RequestException as error:
            found.append(error)
        else:
            found.append(None)

    # In a thread, as nothing else limits how long a name is looked up.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(ALL_SECONDS)
    if not found:
        raise NoAnswer(f"no answer from {url} within {ALL_SECONDS} s")
    if found[0] is not None:
        raise NoAnswer(f"no answer from {url}: {_reason(found[0])}") from found[0]


def _reason(error: Exception) -> object:
    """urllib3's own, where requests has it in an error that says the address once more."""
    return getattr(error.args[0] if error.args else None, "reason", None) or error
