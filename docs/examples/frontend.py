"""A program of several calls: choices, branches and a batch, on a server."""

import os

import sgla.lang as sgl

sgl.set_default_backend(sgl.RuntimeEndpoint(os.environ.get("SGLA_URL", "http://127.0.0.1:30000")))


@sgl.function
def tool_use(s, question):
    s += "Question: " + question + "\nThe best tool for it is a"
    s += sgl.select("tool", [" calculator", " map"]) + ".\n"
    if s["tool"] == " calculator":
        s += "The number is " + sgl.gen("answer", dtype=int, max_tokens=8)
    else:
        s += "The place is" + sgl.gen("answer", stop=["\n", "."], max_tokens=8)


@sgl.function
def advice(s, topic):
    s += sgl.user("Give me advice on " + topic + ".")
    forks = s.fork(2)
    forks += lambda i: sgl.assistant(["Do", "Avoid"][i] + sgl.gen("advice", stop=".", max_tokens=12))
    forks.join()


batch = [{"question": "What is 17 plus 4?"}, {"question": "Where does the Nile end?"}]
for state in tool_use.run_batch(batch, temperature=0):
    print(state.text())

print(advice.run("sleep", temperature=0)["advice"])

for piece in tool_use.run("How many is 3 times 5?", temperature=0, stream=True).text_iter():
    print(piece, end="", flush=True)
