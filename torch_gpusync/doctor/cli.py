"""Running the probes and printing what they found."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from . import build, machine, self_test
from .finding import Finding, Probe, one_line

_PROBES: dict[str, Probe] = {
    "versions": build.versions,
    "library": build.library,
    "devices": machine.devices,
    "memory": machine.memory,
    "processes": machine.processes,
    "self-test": self_test.self_test,
}


def main(argv: list[str] | None = None) -> int:
    """Print the report. Exit code: 0, or 1 when gpusync cannot work here."""
    parser = argparse.ArgumentParser(
        prog="python -m torch_gpusync doctor",
        description="Report versions, devices, memory and limits, and let two ranks synchronise.",
    )
    parser.add_argument("--json", action="store_true", help="print a list of objects instead of text")
    options = parser.parse_args(argv)
    findings = examine()
    if options.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=1))
    else:
        print(_text(findings))
    return 1 if any(finding.status == "bad" for finding in findings) else 0


def examine() -> list[Finding]:
    """Run every probe. Takes a few seconds and starts processes of its own."""
    findings: list[Finding] = []
    for section, probe in _PROBES.items():
        try:
            for finding in probe():
                findings.append(finding)  # one by one: what came before a failure stays
        except Exception as error:
            findings.append(Finding(section, "probe", "unknown", f"failed: {one_line(error)}"))
    return findings


def _text(findings: list[Finding]) -> str:
    lines: list[str] = []
    section = ""
    for finding in findings:
        if finding.section != section:
            section = finding.section
            lines.append(section)
        mark = "" if finding.status == "ok" else f"[{finding.status}] "
        lines.append(f"  {finding.name:24} {mark}{finding.value}")
        if finding.advice:
            lines.append(f"  {'':24} -> {finding.advice}")
    bad = sum(finding.status == "bad" for finding in findings)
    lines.append("gpusync works here" if not bad else f"gpusync cannot work here: {bad} bad finding(s)")
    return "\n".join(lines)
