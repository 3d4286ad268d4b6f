"""Whether a compiled program fits in a device, as one line of HTML or text."""

from __future__ import annotations

from dataclasses import dataclass

from remat_magic.records import Measurement, Report
from remat_magic.views import format as fmt
from remat_magic.views.format import escape


@dataclass(frozen=True, slots=True)
class _Said:
    """``verdict`` is said of the device, ``needs`` are sentences, ``how`` is one."""

    verdict: str
    needs: str
    how: str


def fits_html(measured: Measurement, usable_bytes: int | None, unfinished: bool = False) -> str:
    """What XLA's compiler for a device says of a choice, as HTML.

    Args:
        measured: what was compiled for the device.
        usable_bytes: what a program can have of the device's memory, for where its compiler does not tell.
        unfinished: it is being compiled in full.
    """
    answer = _said(measured, usable_bytes, unfinished)
    if answer is None:
        return f'<span class="remat-fits">{escape(measured.error)}</span>' if measured.error else ""
    kind = "remat-yes" if measured.fits else "remat-no"
    verdict = f"<b>{escape(answer.verdict)}</b>"
    return f'<span class="remat-fits {kind}">{verdict}: {answer.needs} <small>{answer.how}</small></span>'


def fits_text(measured: Measurement, usable_bytes: int | None) -> str:
    """The same as text; the arguments are those of :func:`fits_html`."""
    answer = _said(measured, usable_bytes, False)
    return measured.error if answer is None else f"{answer.verdict}: {answer.needs} {answer.how}"


def estimate_text(device: str, report: Report, usable_bytes: int | None) -> str:
    """Whether a peak fits a device, where its compiler does not say; empty where either is not known.

    That is said only where it is so of the whole range of the estimate.
    """
    peak, low, high = report.peak_bytes, report.peak_low, report.peak_high
    if peak is None or low is None or high is None or usable_bytes is None:
        return ""
    verdict = "fits" if high <= usable_bytes else "does not fit" if low > usable_bytes else "may fit"
    return f"By estimate {verdict} {device}: {fmt.about(peak, low, high)} of {fmt.nbytes(usable_bytes)}."


def _of(needed: int, available: int | None, each: str = "") -> str:
    if not available:
        return f"{fmt.nbytes(needed)}{each}"
    over = f", {fmt.nbytes(needed - available)} too much" if needed > available else ""
    return f"{fmt.nbytes(needed)}{each} of {fmt.nbytes(available)}{over}"


def _said(measured: Measurement, usable_bytes: int | None, unfinished: bool) -> _Said | None:
    needed, available = measured.needed_bytes, measured.available_bytes or usable_bytes
    if measured.error or measured.fits is None or needed is None:
        return None
    quickly = measured.effort == "quick"
    how = f"{'Quickly' if quickly else 'Fully'} compiled"
    if measured.compile_seconds is not None:
        how += f"{' before,' if measured.compiled_before else ''} in {fmt.seconds(measured.compile_seconds)}"
    if quickly:
        how += ": the bytes are not those of production"
    how += "; the full compile is running…" if unfinished else "."
    again = measured.rematerialized or 0
    itself = f" XLA computes {again:,} instruction{'s' * (again != 1)} again by itself." if again else ""
    per_device = " on each" if measured.devices > 1 else ""
    where, idle = measured.device, ""
    if measured.devices_there == 1 and per_device:
        where = f"{measured.devices} {where}"
    elif measured.devices_there > 1 and not per_device:
        where, idle = f"one device of {where}", " The program is on no mesh, and leaves the others idle."
    verdict = f"{'fits' if measured.fits else 'does not fit'} {where}{', compiled quickly' if quickly else ''}"
    mend = "".join(f" {sentence}" for sentence in (measured.mend, *measured.findings) if sentence)
    return _Said(verdict, f"XLA needs {_of(needed, available, per_device)}.{mend}{itself}{idle}", how)
