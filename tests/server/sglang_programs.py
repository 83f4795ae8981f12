"""Programs in SGLang's language, run by ``python sglang_programs.py MODULE URL PICTURE``: one line of JSON
with what they give. ``MODULE``: sgla.lang, or a folder with the files of the sglang package, of which the
language alone is loaded."""

from __future__ import annotations

import base64
import json
import os
import sys
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

HEAD = "A text that is longer than some pages of the cache are. "
CHOICES = [" one", " two", " six"]  # of equal length: SGLang's client counts a token of the prompt, too
NAMES = ("function", "gen", "gen_int", "select", "image", "user", "assistant", "system")
METHODS = ("token_length_normalized", "greedy_token_selection", "unconditional_likelihood_normalized")


def language_of(folder: str) -> Any:
    """SGLang's, without its package's ``__init__``, which loads the server with torch's kernels. What the
    language's modules import of that and of notebooks, they never use in these programs."""
    package = ModuleType("sglang")
    package.__path__ = [os.path.join(folder, "sglang")]
    sys.modules["sglang"] = package
    for name, values in {
        "sglang.srt": {"__path__": []},
        "sglang.srt.environ": {"envs": None},
        "IPython": {"__path__": []},
        "IPython.display": {"HTML": None, "display": None},
        "pybase64": {"b64encode": base64.b64encode, "b64decode": base64.b64decode},
    }.items():
        made = sys.modules[name] = ModuleType(name)
        vars(made).update(values)
    api, choices = import_module("sglang.lang.api"), import_module("sglang.lang.choices")
    endpoint = import_module("sglang.lang.backend.runtime_endpoint").RuntimeEndpoint
    found = {name: getattr(api, name) for name in NAMES} | {name: getattr(choices, name) for name in METHODS}
    return SimpleNamespace(**found, flush_cache=api.flush_cache, RuntimeEndpoint=endpoint)


def results(sgl: Any, url: str, picture: str) -> dict[str, Any]:
    backend = sgl.RuntimeEndpoint(url)
    found: dict[str, Any] = {}

    @sgl.function
    def text(s: Any, begin: str) -> None:
        s += HEAD + begin + sgl.gen("a", max_tokens=6)
        s += " I say" + sgl.gen("b", max_tokens=4, regex="[a-c]+")
        s += " and" + sgl.gen("c", max_tokens=8, stop=["e", "t"])
        s += " or " + sgl.gen("d", max_tokens=4, dtype=int)

    whole = text.run("First", backend=backend, temperature=0)
    found["text"] = [whole.text(), *(whole[name] for name in "abcd")]
    found["stream"] = "".join(text.run("First", backend=backend, temperature=0, stream=True).text_iter("b"))
    begins = [{"begin": f"{i}."} for i in range(5)]
    found["batch"] = [state.text() for state in text.run_batch(begins, backend=backend, temperature=0)]

    @sgl.function
    def fork(s: Any) -> None:
        s += HEAD
        forks = s.fork(3)
        for i, each in enumerate(forks):
            each += f"{i}:" + sgl.gen("part", max_tokens=3, temperature=0)
        forks.join()
        s += " ".join(each["part"] for each in forks)

    found["fork"] = fork.run(backend=backend).text()

    for method in METHODS:

        @sgl.function
        def choose(s: Any, method: str = method) -> None:
            s += HEAD + sgl.select("which", CHOICES, choices_method=getattr(sgl, method))

        found[method] = choose.run(backend=backend, temperature=0)["which"]

    @sgl.function
    def chat(s: Any) -> None:
        s += sgl.system("Be brief.")
        s += sgl.user(sgl.image(picture) + "Who?")
        s += sgl.assistant(sgl.gen("a", max_tokens=6, ignore_eos=True))

    state = chat.run(backend=backend, temperature=0)
    found["chat"] = [state.text(), state["a"]]
    sgl.flush_cache(backend)
    found["again"] = text.run("First", backend=backend, temperature=0).text() == whole.text()
    return found


if __name__ == "__main__":
    module, url, picture = sys.argv[1:]
    language = import_module(module) if module == "sgla.lang" else language_of(module)
    print(json.dumps(results(language, url, picture)), flush=True)
    os._exit(0)  # its threads are no daemons
