"""The demo: a transformer split over several ranks, trained with gpusync ops inside its compiled graph.

One process per rank holds its share of the weights (column- and row-parallel matrices, heads and vocabulary
divided), and the ranks meet in ``torch.ops.gpusync`` ops that ``torch.compile(fullgraph=True)`` has taken
into the graph. The same model is trained unsplit in one process as well, and the demo passes when losses,
logits and weights agree.
"""

from .cli import main, run
from .config import Config

__all__ = ["Config", "main", "run"]
