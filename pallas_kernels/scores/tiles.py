"""How the kernels of bucket scores are cut into programs, found by trying a few launches on an H200."""

from __future__ import annotations

import dataclasses

from pallas_kernels.common.tiles import Launch, fractions, tile_for

SCORE_PROGRAMS = 384  # of the gradients of bucket scores, almost three a multiprocessor


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


def choose_score_tiles(group_heads: int, chunks: int) -> ScoreTiles:
    """Tiles for so many chunks of all groups' sequences: many heads a program, but enough programs."""
    tiles = ScoreTiles()
    fits = fractions(group_heads, tiles.gradients.heads)
    heads = max((h for h in fits if chunks * (group_heads // h) >= SCORE_PROGRAMS), default=1)
    return dataclasses.replace(tiles, gradients=dataclasses.replace(tiles.gradients, heads=heads))


SCORE_CHUNK = 32


def chunk_of_scores(length: int) -> int:
    """Tokens a chunk for bucket scores: what is quadratic in them weighs more there, and a state less."""
    return min(tile_for(length), SCORE_CHUNK)
