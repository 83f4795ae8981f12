"""Search by meaning: all-MiniLM-L6-v2, without a server. (``sgla serve minilm`` answers /v1/embeddings.)"""

from sgla import Engine

DOCUMENTS = ["The Rhine flows through Cologne.", "Bread is made of flour.", "A cat sleeps on the sofa."]

with Engine("minilm") as engine:
    documents = engine.embed(DOCUMENTS)  # float32 [3, 384], of length 1
    query = engine.embed("Where is there a river?")
    scores = documents @ query
    for score, text in sorted(zip(scores, DOCUMENTS), reverse=True):
        print(f"{score:.2f} {text}")
