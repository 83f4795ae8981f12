"""Recorder and native program (under construction)."""


class Recorder: ...
