"""What an engine measures while it loads, watched: kernels run there that nothing else has run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.gpu.results import Results

NAME = "choose products"
LAUNCHES = "choose launches"


def watch(results: Results) -> None:
    """Begin `choose products` before each candidate: a sign of life, and the place of a fault.

    Likewise `choose launches` before that is measured.

    A process whose device such a kernel has taken along is followed by another one, which measures
    nothing: the library's products run, and every figure is there all the same.
    """
    from specc.runtime.backends.cuda import choose_products

    replace: Any = setattr
    _watch_launches(results)
    if NAME in results.known:
        replace(choose_products, "OPERATORS", ())
        results.note(products="not measured: that ended an attempt before this one")
        return
    make_timer = choose_products.graph_timer

    def make(*args: Any) -> Callable[[Callable[[], object], float], float]:
        timer = make_timer(*args)

        def seconds(run: Callable[[], object], best: float) -> float:
            results.begin(NAME)
            return timer(run, best)

        return seconds

    replace(choose_products, "graph_timer", make)


def _watch_launches(results: Results) -> None:
    from specc.runtime.backends.cuda import choose_launches

    replace: Any = setattr
    if LAUNCHES in results.known:
        replace(choose_launches, "can_launch_dependent", lambda device: False)
        results.note(launches="not measured: that ended an attempt before this one")
        return
    choose = choose_launches.choose_launches

    def begin(*args: Any, **options: Any) -> Any:
        results.begin(LAUNCHES)
        return choose(*args, **options)

    replace(choose_launches, "choose_launches", begin)
