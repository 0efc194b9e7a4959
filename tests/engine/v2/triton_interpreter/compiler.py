"""The half of a Triton backend that compiles: never asked, as the interpreter runs kernels as Python."""

from __future__ import annotations

from typing import Any

from triton.backends.compiler import BaseBackend


class Compiler(BaseBackend):
    @staticmethod
    def supports_target(target: Any) -> bool:
        return bool(target.backend == "cpu")

    def hash(self) -> str:
        return "interpreted"

    def parse_options(self, options: dict[str, Any]) -> object:
        raise NotImplementedError

    def add_stages(self, stages: dict[str, Any], options: object, language: Any = None) -> None:
        raise NotImplementedError

    def load_dialects(self, context: Any) -> None:
        raise NotImplementedError

    def get_module_map(self) -> dict[str, Any]:
        return {}
