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


# A read that fails when it is dropped, as it stands in Orbax and elsewhere.
FAILED = """
from loglinear_jax.commands.logs import quiet_libraries

SOURCE = '''
import types

@types.coroutine
def wait(): yield

async def read_{0}():
    try:
        await wait()
    finally:
        raise Exception("{0}")
'''

quiet_libraries()
for name in ("orbax", "another"):
    space = {}
    exec(compile(SOURCE.format(name), f"site-packages/{name}/serialization.py", "exec"), space)
    dropped = space[f"read_{name}"]()
    dropped.send(None)
    del dropped, space
"""


def test_only_the_reads_that_orbax_drops_go_unnamed():
    ended = subprocess.run([sys.executable, "-c", FAILED], capture_output=True, text=True, check=True)
    assert "Exception: another" in ended.stderr and "orbax" not in ended.stderr
