"""The preview before training, as plain text: the sites, and the estimates for dumps and edits."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator

from megatron_flex.errors import FlexError
from megatron_flex.estimate.session_estimate import estimate_live_dump
from megatron_flex.launch.launch_settings import Settings
from megatron_flex.launch.model_alignment import align_with_folder
from megatron_flex.launch.settings_resolver import ResolvedSettings
from megatron_flex.model import FlexModel
from megatron_flex.sites import describe_sites


def describe_preview(flex: FlexModel, settings: Settings, resolved: ResolvedSettings, args: Namespace) -> str:
    """The preview, or the alignment, that the settings request, as lines of text. Collective over the mesh.

    Args:
        flex: the model, with its edits.
        settings: the settings, of which only those of previews are used.
        resolved: the resolved settings.
        args: Megatron's arguments.

    Raises:
        FlexError: on all ranks: a pattern matches nothing, or nothing would be written or edited.
    """
    out: list[str] = []
    if settings.list_sites is not None:
        out.append(str(describe_sites(flex.sites(settings.list_sites), mesh=flex.session.mesh)))
    if settings.estimate:
        out += [""] if out else []
        out += _describe_estimates(flex, resolved, args)
    if settings.align is not None:
        out += [""] if out else []
        out += align_with_folder(flex, settings.align, settings.align_tokens, settings.align_report)
    return "\n".join(out) + "\n"


def _describe_estimates(flex: FlexModel, resolved: ResolvedSettings, args: Namespace) -> Iterator[str]:
    if not resolved.dumps and not resolved.edits:
        raise FlexError(
            "--flex-estimate: nothing would be written or edited; give --flex-dump or --flex-edit"
        )
    for dump in resolved.dumps:
        estimate = estimate_live_dump(flex.session, flex.chunks, args, dump)
        yield f"dump to {dump.path}"
        yield str(estimate)
        if dump.samples is not None:
            yield "all samples are counted, of which only some would be written"
        yield ""
    for hook in resolved.edits:
        yield from _fold_equal_sites(flex.explain(hook))


def _fold_equal_sites(shown: str) -> Iterator[str]:
    """The communication of an edit as text, with equal sites listed once."""
    head, *lines = shown.split("\n")
    yield head
    places: dict[str, str] = {}
    for line in lines:
        if line.startswith("  measured"):
            continue  # a line about calls; no call has run yet
        if line.startswith(" "):
            places[list(places)[-1]] += line + "\n"
        else:
            places[line] = ""
    alike: dict[str, list[str]] = {}
    for name, body in places.items():
        alike.setdefault(body, []).append(name)
    for body, names in alike.items():
        yield names[0] + (f" … {names[-1]} ({len(names)} alike)" if len(names) > 1 else "")
        yield from body.splitlines()
