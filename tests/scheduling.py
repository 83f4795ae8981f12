"""Which process of pytest-xdist runs which file of tests."""

from __future__ import annotations

from typing import Any

from xdist.scheduler import LoadFileScheduling

WAITING = "tests/server/"  # files that wait for processes more than they compute


class OneWaits(LoadFileScheduling):
    """The first process runs the files that wait, so that the others have the cores then. One whose own files
    have all begun helps with the rest.

    A process holds a test back until it knows the next one. So none may be given an empty file, or a single
    test while there are more: it would wait for ever. pytest-xdist 3.8 does both after a process has died."""

    def _assign_work_unit(self, node: Any) -> None:
        waits = node is self.nodes[0]
        own = (file for file in self.workqueue if file.startswith(WAITING) == waits)
        if first := next(own, None):
            self.workqueue.move_to_end(first, last=False)
        super()._assign_work_unit(node)

    def _reschedule(self, node: Any) -> None:
        super()._reschedule(node)
        if not node.shutting_down and self._pending_of(self.assigned_work[node]) < 2:
            self._reschedule(node)

    def remove_node(self, node: Any) -> str | None:
        """What a process that died has not run is for others, but for the test that it died in, which is
        returned."""
        files = self.assigned_work.pop(node)
        left = [test for tests in files.values() for test, done in tests.items() if not done]
        if not left:
            return None
        for test in left[1:]:
            self.workqueue.setdefault(self._split_scope(test), {})[test] = False
        for other in self.nodes:
            self._reschedule(other)
        return left[0]
