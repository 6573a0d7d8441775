"""Where the forms of the table run."""

import pytest

from .forms import kernels_run, types_of


@pytest.fixture(autouse=True)
def where_the_form_runs(request):
    """64-bit types for the forms that have them; kernels in Pallas's interpreter where there is no GPU."""
    form = getattr(request.node, "callspec", None) and request.node.callspec.params.get("form")
    if form is None:
        yield
        return
    with types_of(form), kernels_run():
        yield
