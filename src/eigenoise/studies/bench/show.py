"""Benchmark results as tables and pictures, and what grew since the last ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eigenoise.reporting.figures import bars, power_laws
from eigenoise.reporting.tables import Grid
from eigenoise.studies.bench.growth import AXES, exponent

GREW = 1.15  # a ratio above the old one by this factor, and outside both spreads, has grown


def table(case: str, result: Mapping[str, Any]) -> Grid:
    """Tabulates ratios on one case, with quartiles, the worst step and peak memory."""
    rows = [["SGD with momentum", "1.00", "", "1.0", f"{result['sgd_ms']:.3g}", _memory(result, "SGD")]]
    for name, about in result["methods"].items():
        if "reason" in about:
            rows.append([name, "–", "", "", about["reason"], ""])
            continue
        low, high = about["quartiles"]
        rows.append(
            [
                name,
                f"{about['ratio']:.2f}",
                f"{low:.2f}–{high:.2f}",
                f"{about['worst']:.1f}",
                f"{about['ms']:.3g}",
                _memory(result, name),
            ]
        )
    header = ["method", "ratio", "quartiles", "worst step", "ms a step", "peak MB"]
    return Grid(f"({case}) {result['title']}: cost of a step, SGD = 1", header, rows)


def summary(results: Mapping[str, Any], names: Sequence[str] = (), labels: Sequence[str] = ()) -> Grid:
    """Tabulates ratios of the methods ``labels`` on the cases ``names``, by default all, and peak memory on (c)."""
    cases = {name: result for name, result in sorted(results["cases"].items()) if not names or name in names}
    known = labels or list(dict.fromkeys(label for result in cases.values() for label in result["methods"]))
    rows = []
    for label in ["SGD with momentum", *known]:
        ratios = ["1" if label == "SGD with momentum" else _ratio(result, label) for result in cases.values()]
        used = _memory(cases["c"], "SGD" if label == "SGD with momentum" else label) if "c" in cases else ""
        rows.append([label, *ratios, used])
    header = ["cost of a step, SGD = 1", *(f"({name})" for name in cases), "peak MB (c)"]
    return Grid("What a step costs", header, rows)


def _ratio(result: Mapping[str, Any], label: str) -> str:
    about = result["methods"].get(label, {})
    return f"{about['ratio']:.2f}" if "ratio" in about else ""


def _memory(result: Mapping[str, Any], name: str) -> str:
    used = result.get("memory", {}).get(name)
    return "" if used is None else f"{used:.0f}"


def growth_table(growth: Mapping[str, Any]) -> Grid:
    """Tabulates fitted powers beside the theoretical ones."""
    rows = []
    for name, about in growth.items():
        for kind, costs in about["ms"].items():
            rows.append(
                [
                    AXES[name].title,
                    kind,
                    f"{about['sizes'][0]}–{about['sizes'][-1]}",
                    f"{costs[0]:.3g}–{costs[-1]:.3g}",
                    f"{exponent(about['sizes'], costs):.2f}",
                    f"{AXES[name].theory[kind]:g}",
                ]
            )
    header = ["what grows", "part of the cost", "from–to", "ms", "fitted power", "in theory"]
    return Grid("How the cost of noisy EK-FAC grows", header, rows)


def grids(results: Mapping[str, Any]) -> list[Grid]:
    """Builds all tables."""
    tables = [table(case, result) for case, result in results["cases"].items()]
    return [*tables, growth_table(results["growth"])] if results.get("growth") else tables


def pictures(results: Mapping[str, Any], out: Path) -> list[Path]:
    """Draws bars of ratios for each case, and the growth of the cost."""
    cases = {
        f"({case}) {result['title']}": {
            name: about["ratio"] for name, about in result["methods"].items() if "ratio" in about
        }
        for case, result in results["cases"].items()
    }
    paths = bars(cases, out / "bench") if cases else []
    if results.get("growth"):
        panels = {AXES[name].title: (about["sizes"], about["ms"]) for name, about in results["growth"].items()}
        paths += power_laws(panels, out / "bench-growth")
    return paths


def grown(new: Mapping[str, Any], old: Mapping[str, Any]) -> list[str]:
    """Returns a line for each cost that grew."""
    lines = []
    for case, result in new["cases"].items():
        before = old["cases"].get(case, {"methods": {}})["methods"]
        for name, about in result["methods"].items():
            was = before.get(name, {})
            if "ratio" not in about or "ratio" not in was:
                continue
            if about["ratio"] > GREW * was["ratio"] and about["quartiles"][0] > was["quartiles"][1]:
                lines.append(f"({case}) {name}: {was['ratio']:.2f} before, {about['ratio']:.2f} now")
        for name, used in result.get("memory", {}).items():
            then = old["cases"].get(case, {}).get("memory", {}).get(name)
            if then and used and used > GREW * then:
                lines.append(f"({case}) {name}: {then:.0f} MB before, {used:.0f} MB now")
    return lines
