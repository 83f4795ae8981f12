"""What a small model knows: right answers to 30 easy questions, and loops in 30 open ones. One JSON line a
setting.

    python bench/questions.py --model demo --settings '{"temperature": 0}' '{"temperature": 0.2, "repetition_penalty": 1.1}'

A setting has the fields of ``SamplingParams``, and may have ``system``, a system message, ``examples``, pairs
of questions and answers that come before, and ``talk``: what the page and ``sgla chat`` ask for besides. An
answer is right if it has one of the words before its 200th character; it loops if eight words in a row come
back four times. The questions are what a newcomer asks first, and were written down before any model was
measured.
"""  # noqa: E501

from __future__ import annotations

import argparse
import json
import re
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from sgla import Engine
from sgla.engine import Output

EASY = {
    "What is the capital of France?": "paris",
    "What is the capital of Italy?": "rome",
    "What is the capital of Germany?": "berlin",
    "What is the capital of Japan?": "tokyo",
    "What is the capital of Spain?": "madrid",
    "What is 2 + 2?": "4|four",
    "What is 7 + 5?": "12|twelve",
    "What is 10 minus 3?": "7|seven",
    "How many days are in a week?": "7|seven",
    "How many months are in a year?": "12|twelve",
    "How many legs does a spider have?": "8|eight",
    "How many hours are in a day?": "24|twenty-four",
    "What colour is the sky on a clear day?": "blue",
    "What colour do you get if you mix blue and yellow?": "green",
    "What is the opposite of hot?": "cold",
    "What is the opposite of up?": "down",
    "What planet do we live on?": "earth",
    "What is the largest planet in the solar system?": "jupiter",
    "Which star is closest to the Earth?": "sun",
    "Who wrote Romeo and Juliet?": "shakespeare",
    "Who painted the Mona Lisa?": "leonardo|da vinci",
    "Who was the first president of the United States?": "washington",
    "What is the chemical formula of water?": "h2o|h₂o",
    "At how many degrees Celsius does water boil?": "100",
    "What is frozen water called?": "ice",
    "Which animal says meow?": "cat|cats",
    "What is the largest ocean on Earth?": "pacific",
    "On which continent is Egypt?": "africa",
    "Which language do people speak in Brazil?": "portuguese",
    "What is the plural of mouse?": "mice",
}
# As easy, and never used to choose a setting.
HELD_BACK = {
    "What is the capital of England?": "london",
    "What is the capital of Russia?": "moscow",
    "What is the capital of China?": "beijing",
    "What is the capital of Canada?": "ottawa",
    "What is the capital of Greece?": "athens",
    "What is 3 + 4?": "7|seven",
    "What is 5 times 2?": "10|ten",
    "What is 9 minus 4?": "5|five",
    "How many minutes are in an hour?": "60|sixty",
    "How many seconds are in a minute?": "60|sixty",
    "How many legs does a dog have?": "4|four",
    "How many fingers are on one hand?": "5|five",
    "What colour is grass?": "green",
    "What colour do you get if you mix red and yellow?": "orange",
    "What is the opposite of big?": "small|little",
    "What is the opposite of day?": "night",
    "What do bees make?": "honey",
    "What is the smallest planet in the solar system?": "mercury",
    "What goes around the Earth at night and shines?": "moon",
    "Who wrote Hamlet?": "shakespeare",
    "Who discovered gravity when an apple fell?": "newton",
    "Who was the first man on the moon?": "armstrong",
    "What gas do humans need to breathe?": "oxygen",
    "At how many degrees Celsius does water freeze?": "0|zero",
    "Which animal says woof?": "dog|dogs",
    "What is the largest animal in the world?": "whale|whales",
    "Which is the tallest mountain on Earth?": "everest",
    "On which continent is France?": "europe",
    "Which language do people speak in Mexico?": "spanish",
    "What is the plural of child?": "children",
}
# As easy, to choose a setting by, so that the others say what it is worth.
TO_CHOOSE = {
    "What is the capital of Portugal?": "lisbon",
    "What is the capital of Poland?": "warsaw",
    "What is the capital of Austria?": "vienna",
    "What is the capital of Ireland?": "dublin",
    "What is the capital of Norway?": "oslo",
    "What is the capital of Sweden?": "stockholm",
    "What is the capital of India?": "delhi",
    "What is the capital of Turkey?": "ankara",
    "What is the capital of Cuba?": "havana",
    "What is the capital of Hungary?": "budapest",
    "What is 1 + 1?": "2|two",
    "What is 3 + 3?": "6|six",
    "What is 5 + 4?": "9|nine",
    "What is 6 + 5?": "11|eleven",
    "What is 8 minus 2?": "6|six",
    "What is 5 minus 4?": "1|one",
    "What is 2 times 3?": "6|six",
    "What is half of ten?": "5|five",
    "How many sides does a triangle have?": "3|three",
    "How many sides does a square have?": "4|four",
    "How many wheels does a car have?": "4|four",
    "How many wheels does a bicycle have?": "2|two",
    "How many eyes do people have?": "2|two",
    "How many letters does the English alphabet have?": "26|twenty-six",
    "How many weeks are in a year?": "52|fifty-two",
    "How many seasons are in a year?": "4|four",
    "What colour is snow?": "white",
    "What colour is a ripe banana?": "yellow",
    "What colour is blood?": "red",
    "What colour do you get if you mix red and blue?": "purple|violet",
    "What colour do you get if you mix black and white?": "gray|grey",
    "What is the opposite of black?": "white",
    "What is the opposite of left?": "right",
    "What is the opposite of good?": "bad|evil",
    "What is the opposite of fast?": "slow",
    "What is the opposite of young?": "old",
    "What is the red planet?": "mars",
    "Which planet has the best known rings?": "saturn",
    "Which planet is closest to the sun?": "mercury",
    "Who wrote Oliver Twist?": "dickens",
    "Who wrote Harry Potter?": "rowling",
    "Who painted The Starry Night?": "van gogh|gogh",
    "Who invented the telephone?": "bell",
    "Who developed the theory of relativity?": "einstein",
    "Who composed the Moonlight Sonata?": "beethoven",
    "Which American president ended slavery?": "lincoln",
    "What do plants need from the sun?": "light|sunlight|energy",
    "Which animal says moo?": "cow|cows",
    "Which animal says quack?": "duck|ducks",
    "What do cows give us to drink?": "milk",
    "What is the tallest animal in the world?": "giraffe|giraffes",
    "Which is the longest river in Africa?": "nile",
    "On which continent is China?": "asia",
    "On which continent is Brazil?": "america",
    "On which continent is Kenya?": "africa",
    "Which language do people speak in Germany?": "german",
    "Which language do people speak in Japan?": "japanese",
    "In which country is the Eiffel Tower?": "france",
    "In which country are the pyramids of Giza?": "egypt",
    "What is the plural of foot?": "feet",
    "What is the plural of tooth?": "teeth",
    "What is the past tense of go?": "went",
    "What is the first month of the year?": "january",
    "Which day comes after Monday?": "tuesday",
    "Which organ pumps blood through the body?": "heart",
    "What metal is attracted by magnets?": "iron|steel",
}
OPEN = [
    "Hello! Who are you?",
    "Tell me a joke.",
    "Write a short story about a dragon.",
    "Write a poem about the sea.",
    "Explain what a computer is.",
    "How do I bake bread?",
    "What can I do on a rainy day?",
    "Name three rivers.",
    "List ten animals.",
    "Why is the sky blue?",
    "Write an email to my boss that I am ill today.",
    "What is love?",
    "How does a car engine work?",
    "Give me five ideas for dinner.",
    "Write a Python function that adds two numbers.",
    "Tell me about Rome.",
    "How can I learn English?",
    "What is the difference between a cat and a dog?",
    "Describe a sunset.",
    "Write a letter to my grandmother.",
    "What should I see in Paris?",
    "How do plants grow?",
    "Explain democracy to a child.",
    "Count from one to twenty.",
    "Write a dialogue between two friends.",
    "What is artificial intelligence?",
    "Give me tips for a job interview.",
    "Tell me about the history of football.",
    "How do I make a cup of tea?",
    "What is the meaning of life?",
]
WORDS, TIMES = 8, 4  # of a loop
EASY_TOKENS, OPEN_TOKENS = 64, 512


def right(answer: str, words: str) -> bool:
    return re.search(rf"\b(?:{words})\b", answer[:200].lower()) is not None


def loops(answer: str) -> bool:
    words = answer.split()
    runs = Counter(tuple(words[i : i + WORDS]) for i in range(len(words) - WORDS + 1))
    return max(runs.values(), default=0) >= TIMES


def ask(engine: Engine, questions: list[str], setting: dict[str, Any], tokens: int) -> list[Output]:
    fields = {"max_tokens": tokens, "seed": 0} | setting
    if fields.pop("talk", False):
        fields = engine.chat_params | fields
    system = fields.pop("system", None)
    begin = [{"role": "system", "content": system}] if system else []
    for asked, answered in fields.pop("examples", []):
        begin += [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
    sampling = engine.sampling(**fields)

    def chat(question: str) -> Output:
        return engine.chat([*begin, {"role": "user", "content": question}], sampling)

    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(chat, questions))


def measure(engine: Engine, easy: dict[str, str], setting: dict[str, Any], told: bool) -> dict[str, Any]:
    began = time.monotonic()
    answers = ask(engine, list(easy), setting, EASY_TOKENS)
    wrong = {
        question: output.text[:200]
        for (question, words), output in zip(easy.items(), answers)
        if not right(output.text, words)
    }
    result = {"setting": setting, "right": len(easy) - len(wrong), "wrong": wrong}
    if told:
        outputs = ask(engine, OPEN, setting, OPEN_TOKENS)
        ended = Counter(output.finish for output in outputs)
        result["loops"] = [question for question, output in zip(OPEN, outputs) if loops(output.text)]
        result["ended"] = dict(ended)
        result["tokens"] = sum(output.usage.completion_tokens for output in outputs)
    return result | {"seconds": round(time.monotonic() - began, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="demo")
    parser.add_argument("--chat-template", help="file, for a model without one")
    parser.add_argument("--settings", nargs="+", default=["{}"], metavar="JSON")
    parser.add_argument("--open", action="store_true", help="ask the open questions, too")
    parser.add_argument("--held-back", action="store_true", help="ask 30 other easy questions")
    parser.add_argument("--to-choose", action="store_true", help="ask those to choose a setting by")
    args = parser.parse_args()
    easy = HELD_BACK if args.held_back else TO_CHOOSE if args.to_choose else EASY
    with Engine(args.model, chat_template=args.chat_template, context_length=2048) as engine:
        for setting in args.settings:
            found = measure(engine, easy, json.loads(setting), args.open)
            print(json.dumps({"model": args.model, "template": args.chat_template, **found}), flush=True)


if __name__ == "__main__":
    main()
