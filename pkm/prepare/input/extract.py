"""HTML page to article text: trafilatura, in datatrove's sandbox, so that no page can crash or stall a preparation."""

from __future__ import annotations

import ctypes
import signal
import sys
from typing import Any

from pkm.errors import UserError
from pkm.prepare.input.records import Damaged

# Pages take milliseconds. Only one that would take for ever reaches this, so it does not depend on the machine's load.
SECONDS = 120.0
PR_SET_PDEATHSIG = 1
_DIE_WITH_PARENT = "\0"
"""The first text a sandbox gets, before any page."""

_sandbox: tuple[Any, Any] | None = None


def extract(html: str) -> str | None:
    """The main text of a page, paragraphs on lines of their own; None if there is none.

    Raises Damaged where the page brought the extractor down.
    """
    if not html.strip():
        return None
    sandbox, extractor = _running()
    try:
        return sandbox.process_document(html, extractor)
    except TimeoutError as error:
        raise Damaged(f"extraction took over {SECONDS:g} s") from error
    except (EOFError, BrokenPipeError, ConnectionResetError) as error:
        sandbox._cleanup_process()
        raise Damaged("extraction crashed") from error


def close() -> None:
    """End the sandbox's process, if one runs; the next page starts another."""
    if _sandbox is not None:
        _sandbox[0]._cleanup_process()


class _Extract:
    """What runs in the sandbox."""

    def __init__(self, extractor: Any):
        self._extractor = extractor

    def __call__(self, text: str) -> str | None:
        if text != _DIE_WITH_PARENT:
            return self._extractor.extract(text)
        if sys.platform == "linux":
            # A parent that is killed cannot end it, and it would wait for ever for the next page.
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        return None


def _running() -> tuple[Any, Any]:
    global _sandbox
    if _sandbox is None:
        try:
            # Here, so that a broken installation is not taken for a broken page.
            import trafilatura  # noqa: F401
        except ImportError as error:
            fix = "pip install trafilatura lxml_html_clean"
            raise UserError(f"web pages need trafilatura, which cannot be imported: {error}", fix=fix) from error
        from datatrove.pipeline.extractors import Trafilatura
        from datatrove.pipeline.extractors.base import ExtractorSandbox

        # Its own deduplication remembers earlier pages: the result would depend on who read what.
        sandbox = ExtractorSandbox(timeout=SECONDS, warmup_text=_DIE_WITH_PARENT)
        _sandbox = sandbox, _Extract(Trafilatura(favour_precision=True, deduplicate=False, timeout=SECONDS))
    return _sandbox
