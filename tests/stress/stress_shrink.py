"""A smaller program that still fails: operations are left out, many at a time, then one by one."""

from __future__ import annotations

from collections.abc import Callable

from stress_program import Program

ATTEMPTS = 100  # programs tried at most: each may take a timeout to fail


def shrunk(program: Program, fails: Callable[[Program], bool], attempts: int = ATTEMPTS) -> Program:
    """The smallest program found for which `fails` holds; the same object if there is none.

    Delta debugging (Zeller & Hildebrandt 2002): leave out ever smaller parts for as long as it
    still fails.
    """
    part = max(1, len(program.ops) // 2)
    while attempts > 0:
        numbers = list(program.ops)
        smaller = False
        for start in range(0, len(numbers), part):
            attempt = program.without(numbers[start : start + part])
            if len(attempt.ops) < len(program.ops) and attempts > 0:
                attempts -= 1
                if fails(attempt):
                    program, smaller = attempt, True
        if not smaller:
            if part == 1:
                break
            part = max(1, part // 2)
    return program
