"""How the kernels of bucket scores are cut into programs, found by trying a few launches on an H200."""

from __future__ import annotations

import dataclasses

from pallas_kernels.common.support import gpu
from pallas_kernels.common.tiles import Launch, fractions, tile_for

PROGRAMS_A_MULTIPROCESSOR = 384 / 132  # of the gradients of bucket scores, almost three


@dataclasses.dataclass(frozen=True)
class ScoreTiles:
    """Those of bucket scores."""

    scores: Launch = Launch(8, 1, 1)
    gradients: Launch = Launch(48, 2, 1)

    def fitted(self, group_heads: int) -> ScoreTiles:
        """The same with no more heads a program than a group has, in whole fractions of them."""

        def fits(launch: Launch) -> Launch:
            heads = max(h for h in range(1, launch.heads + 1) if group_heads % h == 0)
            return dataclasses.replace(launch, heads=heads)

        return ScoreTiles(fits(self.scores), fits(self.gradients))


def choose_score_tiles(group_heads: int, chunks: int, key_dim: int = 128, precision: str = "bf16") -> ScoreTiles:
    """Tiles for so many chunks of all groups' sequences: many heads a program, but enough programs. precision: a `dot_mode`."""
    tiles = ScoreTiles()
    if precision == "f32" or (precision == "tf32" and key_dim > 128):  # fewer warps would have too few registers
        tiles = ScoreTiles(Launch(8, 4, 1), Launch(48, 4, 1))
    enough = round(PROGRAMS_A_MULTIPROCESSOR * gpu().multiprocessors)
    fits = fractions(group_heads, tiles.gradients.heads)
    heads = max((h for h in fits if chunks * (group_heads // h) >= enough), default=1)
    return dataclasses.replace(tiles, gradients=dataclasses.replace(tiles.gradients, heads=heads))


SCORE_CHUNK = 32


def chunk_of_scores(length: int) -> int:
    """Tokens a chunk for bucket scores: what is quadratic in them weighs more there, and a state less."""
    return min(tile_for(length), SCORE_CHUNK)
