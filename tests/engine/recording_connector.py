"""A KV connector that does nothing but write down the KV-cache groups that its engine gives each side.

`report` in the extra config names a directory; each role leaves `scheduler.json` or `worker.json` there.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)

from hsconnector.connector.vllm_specs import groups_from_vllm
from hsconnector.layout.specs import Group, HiddenState
from hsconnector.layout.started import check_started


class RecordingConnector(KVConnectorBase_V1, SupportsHMA):
    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        folder = Path(vllm_config.kv_transfer_config.kv_connector_extra_config["report"])
        side = "scheduler" if role is KVConnectorRole.SCHEDULER else "worker"
        groups = groups_from_vllm(kv_cache_config.kv_cache_groups)
        started = check_started(
            groups,
            cache_block_size=vllm_config.cache_config.block_size,
            prefix_caching=bool(vllm_config.cache_config.enable_prefix_caching),
            hash_block_size=kv_cache_config.hash_block_size,
            hidden_size=vllm_config.model_config.get_hidden_size(),
        )
        report = {
            "line": started.line,
            "groups": [_group(group) for group in groups],
            "num_blocks": kv_cache_config.num_blocks,
            "block_size": vllm_config.cache_config.block_size,
            "hash_block_size": kv_cache_config.hash_block_size,
            "hit_tokens": kv_cache_config.cache_hit_alignment_tokens,
            "tokens": getattr(vllm_config.cache_config, "kv_cache_size_tokens", None),
            "bytes": sum({tensor.size for tensor in kv_cache_config.kv_cache_tensors}),
            "in_flight_tokens": vllm_config.max_in_flight_tokens,
        }
        (folder / f"{side}.json").write_text(json.dumps(report))

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        pass

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        pass

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        pass

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        return False, None


def _group(group: Group) -> dict[str, Any]:
    return {
        "kind": group.spec.described,
        "layers": len(group.layer_names),
        "block_size": group.spec.block_size,
        "page_bytes": group.spec.page_size_bytes,
        "waste_bytes": sum(spec.waste_bytes for _, spec in group.members if isinstance(spec, HiddenState)),
    }
