"""Without a GPU nothing here is collected: these tests have nothing to say there."""

from __future__ import annotations

import torch

collect_ignore_glob = [] if torch.cuda.is_available() else ["test_*.py"]
