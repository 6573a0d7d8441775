"""What libraries say on top of what they raise is not shown, and everything else is."""

import subprocess
import sys

# Two coroutines that nothing awaits, found by Python's garbage collector when the process ends.
DROPPED = """
import gc
import loglinear_jax.runs.checkpoints
from loglinear_jax.commands.logs import quiet_libraries

def async_serialize_from_host():
    async def write_fragment(): ...
    return write_fragment()

async def another(): ...

class Cycle: ...

gc.disable()
quiet_libraries()
cycle = Cycle()
cycle.held = cycle, async_serialize_from_host(), another()
del cycle
"""


def test_only_the_writes_that_orbax_drops_go_unnamed():
    ended = subprocess.run([sys.executable, "-c", DROPPED], capture_output=True, text=True, check=True)
    named = [line for line in ended.stderr.splitlines() if "never awaited" in line]
    assert len(named) == 1 and "coroutine 'another'" in named[0]
