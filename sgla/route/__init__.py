"""The router: one address in front of several servers. ``docs/router.md`` tells how to use it.

``config`` has its settings. What decides is in one process: ``balancer`` places requests on ``workers`` by
``policies`` and ``prefix``, within ``limits``; ``watch`` and ``discovery`` keep the workers' states. What
carries bytes is in as many processes as there are cores: ``front`` takes requests, ``exchange`` passes them
to workers over ``upstream``, in the words of ``wire``; ``owner`` is how they ask the one process.
"""
