"""A fixed set of what people say to a small model, for measurements of single streams."""

TEXT = (
    "The bicycle was invented in the nineteenth century. Early bicycles had a very large front wheel and "
    "were hard to ride. In 1885 John Kemp Starley built a bicycle with two wheels of the same size and a "
    "chain to the rear wheel. It was called the safety bicycle, and bicycles have looked much like it since."
)
CODE = (
    "def total(prices):\n    result = 0\n    for price in prices:\n        result += price\n    return result"
)

CHATS = (
    "What is the capital of France?",
    "Why is the sky blue?",
    "Explain in a few sentences how a refrigerator keeps food cold.",
    "Write a short poem about the sea.",
    "Give me five tips for learning a new language.",
    "Who wrote Romeo and Juliet, and what is it about?",
    "Write an email to my landlord that the heating does not work.",
    "What should I see in Rome in two days?",
    "Tell me a story about a fox who wants to fly.",
    "How do I make pancakes? List ingredients and steps.",
    "What is the difference between a virus and a bacterium?",
    "Write a Python function that returns the n-th Fibonacci number.",
    "I feel tired all day. What could help?",
    "Explain what inflation is to a child.",
    f"Summarize this text in one sentence: {TEXT}",
    f"Correct the spelling, and change nothing else: {TEXT.replace('wheel', 'weel')}",
    f"Add a docstring to this function and show the whole of it:\n{CODE}",
    "List the planets of the solar system from the sun outwards.",
    "Is it better to rent or to buy a flat?",
    "Translate into French: Good morning, where is the train station?",
)
