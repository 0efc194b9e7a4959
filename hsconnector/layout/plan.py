"""model config -> specs -> groups -> a report: what the engine will do, before it is started."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hsconnector.capture.layers import LayerChoice, slot_name, trainer_counting
from hsconnector.errors import LayoutError
from hsconnector.layout.capacity import Capacity, capacity
from hsconnector.layout.defects import Circumstances, biting
from hsconnector.layout.granularity import BlockSizes, check_granularity, resolve_block_sizes
from hsconnector.layout.locate import HiddenGroup, locate_hidden_group
from hsconnector.layout.models import Model
from hsconnector.layout.rules import Grouping, form_groups
from hsconnector.layout.serving import CacheSpecs, Serving, cache_specs, pipeline_stages
from hsconnector.layout.specs import Composite, Group, HiddenState, Spec, dtype_bytes, layer_specs
from hsconnector.vllm_facts import RULES_VERSION, Defect, parse_version, too_old

__all__ = ["GroupReport", "Plan", "StorageReport", "make_plan"]

SHARD_HEADER_BYTES = 2_048
"""What a shard's header takes, about; the rest of a shard is rows and token ids."""
TYPICAL_ROWS = 1_024
"""Rows of a shard for which the header's share is counted."""


@dataclass(frozen=True)
class GroupReport:
    """One KV-cache group. `page_bytes` is one layer's page, `waste_bytes` what of it holds nothing."""

    index: int
    kind: str
    layers: int
    block_size: int
    page_bytes: int
    waste_bytes: int
    holds_hidden_states: bool


@dataclass(frozen=True)
class StorageReport:
    """Bytes a token of the rows: in the model's dtype, and as fp8 with one scale a token and slot."""

    wire: int
    wire_fp8: int
    disk: int
    disk_fp8: int
    tokens: int | None
    total: int | None
    total_fp8: int | None


@dataclass(frozen=True)
class Plan:
    """What the engine will do. `refused` says why it does not start; then groups may be empty."""

    model: Model
    serving: Serving
    layers: LayerChoice
    storage: StorageReport
    assumptions: tuple[str, ...]
    specs: CacheSpecs | None = None
    engine_groups: tuple[Group, ...] = ()
    hidden: HiddenGroup | None = None
    groups: tuple[GroupReport, ...] = ()
    block_sizes: BlockSizes | None = None
    block_size_note: str = ""
    granularity_note: str = ""
    without: Capacity | None = None
    with_extraction: Capacity | None = None
    inflation: float = 1.0
    defects: tuple[Defect, ...] = ()
    refused: str | None = None
    helps: tuple[str, ...] = ()

    @property
    def slots(self) -> tuple[str, ...]:
        return tuple(slot_name(layer) for layer in self.layers.layer_ids)

    @property
    def trainer_ids(self) -> tuple[int, ...]:
        return trainer_counting(self.layers.layer_ids)

    @property
    def share_lost(self) -> float | None:
        """The part of the tokens that fit without extraction and do not with it, 0 to 1."""
        if self.without is None or self.with_extraction is None:
            return None
        return 1 - self.without.bytes_per_token / self.with_extraction.bytes_per_token

    @property
    def request_bytes(self) -> int | None:
        """A rank's KV cache for one request of the full length: the model's own and the bytes of its rows."""
        if self.without is None or self.specs is None:
            return None
        return int((self.without.bytes_per_token + self.storage.wire) * self.specs.max_model_len)


def make_plan(
    model: Model,
    serving: Serving,
    layers: LayerChoice,
    *,
    kv_memory: int | None = None,
    tokens: int | None = None,
    version: str = RULES_VERSION,
) -> Plan:
    """The whole report. `kv_memory` is bytes of KV cache a rank, `tokens` the size of a data set.

    SettingsError for options that contradict the model; what the engine refuses becomes `Plan.refused`.
    """
    empty = Plan(model, serving, layers, _storage(model, layers, tokens), model.assumptions)
    try:
        _check_engine(model, version)
        specs = cache_specs(model, serving, len(layers.layer_ids))
        plain = cache_specs(model, serving, len(layers.layer_ids), speculative_tokens=0)
        return _planned(empty, specs, plain, kv_memory, parse_version(version))
    except LayoutError as refused:
        return replace(empty, refused=str(refused), helps=_helps(empty))


def _planned(plan: Plan, specs: CacheSpecs, plain: CacheSpecs, memory: int | None, version: tuple[int, ...]) -> Plan:
    serving = plan.serving
    grouping = Grouping(hybrid_manager=serving.hybrid_manager)
    groups = form_groups(specs.extracting, grouping)
    before = form_groups(plain.target, grouping)
    engine = form_groups(specs.extracting, replace(grouping, as_engine=True))
    hidden = locate_hidden_group(groups)
    sizes = resolve_block_sizes(groups, prefix_caching=serving.prefix_caching)
    without = _capacity(plan, plain, before, memory)
    with_extraction = _capacity(plan, specs, groups, memory)
    inflation = _inflation(groups, hidden, with_extraction)
    grown = groups[0].spec.block_size // form_groups(specs.target, grouping)[0].spec.block_size
    case = Circumstances(
        groups=groups,
        version=version,
        device=serving.device,
        prefix_caching=serving.prefix_caching,
        pp=serving.pp,
        inflation=inflation,
        scaled=grown > 1,
    )
    plan = replace(
        plan,
        specs=specs,
        engine_groups=groups,
        hidden=hidden,
        groups=tuple(_group_report(index, group) for index, group in enumerate(groups)),
        block_sizes=sizes,
        block_size_note=_block_size_note(specs, grown),
        granularity_note=_granularity_note(groups, sizes, serving.prefix_caching),
        without=without,
        with_extraction=with_extraction,
        inflation=inflation,
        defects=tuple(biting(case)),
        assumptions=specs.assumptions,
    )
    refused = _refusal(plan, engine)
    return plan if refused is None else replace(plan, refused=refused, helps=_helps(plan))


def _check_engine(model: Model, version: str) -> None:
    if (reason := too_old(version)) is not None:
        raise LayoutError(reason)
    if not model.hands_out_hidden_states:
        raise LayoutError(
            f"{model.architecture} hands out no hidden states in vLLM {RULES_VERSION} (it lacks SupportsEagle3); "
            "--model-impl transformers may serve it with them"
        )


def _refusal(plan: Plan, engine: Sequence[Group]) -> str | None:
    """The first reason for which the engine would not start, or not serve one request of the full length."""
    serving, sizes, held = plan.serving, plan.block_sizes, plan.with_extraction
    pages = sorted({group.spec.page_size_bytes for group in engine})
    if len(engine) > 1 and len(pages) > 1:
        return (
            f"the engine's groups would have pages of {', '.join(f'{page:,}' for page in pages)} bytes, which its "
            "layout cannot express (a Mamba page does not grow with a hidden row)"
        )
    if sizes is not None:
        try:
            check_granularity(plan.engine_groups, sizes, prefix_caching=serving.prefix_caching)
        except LayoutError as refused:
            return str(refused)
    if held is not None and held.requests is not None and held.num_blocks is not None:
        needed = held.bytes_per_block * held.blocks_per_request
        usable = held.bytes_per_block * (held.num_blocks - 1)
        if needed > usable:
            length = plan.specs.max_model_len if plan.specs else 0
            return (
                f"one request of {length:,} tokens needs {needed / 2**30:.2f} GiB of KV cache a rank and "
                f"{max(usable, 0) / 2**30:.2f} GiB are there"
            )
    return None


def _helps(plan: Plan) -> tuple[str, ...]:
    helps = [defect.helps for defect in plan.defects if defect.at_start]
    if plan.with_extraction is not None and plan.with_extraction.requests is not None:
        helps.append("a smaller --max-model-len, more --kv-memory, or a larger --tp")
    if len(plan.layers.layer_ids) > 2:
        helps.append(f"fewer layers than {len(plan.layers.layer_ids)}")
    return tuple(dict.fromkeys(helps))


def _capacity(plan: Plan, specs: CacheSpecs, groups: Sequence[Group], memory: int | None) -> Capacity:
    """Of the pipeline stage that takes the most bytes a token: the fewest blocks decide for all."""
    stages = pipeline_stages(plan.model.num_layers, plan.serving.pp)
    held = [
        capacity(
            _on_stage(groups, specs, stage, last=index == len(stages) - 1),
            max_model_len=specs.max_model_len,
            in_flight_tokens=plan.serving.in_flight_tokens,
            memory=memory,
        )
        for index, stage in enumerate(stages)
    ]
    return max(held, key=lambda each: each.bytes_per_block)


def _on_stage(groups: Sequence[Group], specs: CacheSpecs, stage: range, *, last: bool) -> list[Group]:
    """The groups with only this stage's layers; the hidden layer lives on the last one."""

    def here(name: str) -> bool:
        return last if name == specs.hidden_name else int(name.split(".")[2]) in stage

    projected = []
    for group in groups:
        names = tuple(name for name in group.layer_names if here(name))
        spec: Spec = group.spec
        if isinstance(spec, Composite) and names:
            spec = replace(spec, layers=tuple((name, inner) for name, inner in spec.layers if here(name)))
        projected.append(Group(names, spec))
    return projected


def _inflation(groups: Sequence[Group], hidden: HiddenGroup, held: Capacity) -> float:
    """Bytes that the pool spends on one hidden row over the row's own bytes; 1 inside a composite."""
    if hidden.spec is None or isinstance(groups[hidden.index].spec, Composite):
        return 1.0
    return held.bytes_per_block / hidden.block_size / hidden.spec.row_bytes


def _group_report(index: int, group: Group) -> GroupReport:
    specs = layer_specs(group.spec)
    return GroupReport(
        index=index,
        kind=group.spec.described,
        layers=len(group.layer_names),
        block_size=group.spec.block_size,
        page_bytes=group.spec.page_size_bytes,
        waste_bytes=sum(spec.page_size_bytes - spec.dense_page_bytes for spec in specs),
        holds_hidden_states=any(isinstance(spec, HiddenState) for spec in specs),
    )


def _block_size_note(specs: CacheSpecs, grown: int) -> str:
    note = f"{specs.block_size} tokens ({specs.why_block_size})"
    if specs.block_size != specs.asked_block_size:
        note = f"{specs.asked_block_size} becomes {note}"
    if grown > 1:
        note += f"; then times {grown}, because one hidden row is larger than a page (vllm#50894)"
    return note


def _granularity_note(groups: Sequence[Group], sizes: BlockSizes, prefix_caching: bool) -> str:
    if not prefix_caching:
        return "prefix caching is off: no reuse"
    others = [group.spec.block_size for group in groups if not isinstance(group.spec, HiddenState)]
    note = f"a prefix is reused in steps of {sizes.hit:,} tokens"
    if others and sizes.hit > min(others):
        note += f", coarser than the {min(others):,} tokens of the smallest block"
    return note


def _storage(model: Model, layers: LayerChoice, tokens: int | None) -> StorageReport:
    slots = len(layers.layer_ids)
    row = slots * model.hidden_size * dtype_bytes(model.dtype)
    fp8 = slots * (model.hidden_size + 4)
    per_token = 8 + SHARD_HEADER_BYTES // TYPICAL_ROWS
    disk, disk_fp8 = row + per_token, fp8 + per_token
    return StorageReport(
        wire=row,
        wire_fp8=fp8,
        disk=disk,
        disk_fp8=disk_fp8,
        tokens=tokens,
        total=None if tokens is None else tokens * disk,
        total_fp8=None if tokens is None else tokens * disk_fp8,
    )
