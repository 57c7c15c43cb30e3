"""The twelve prompts of the oracle fixture; read by record_oracle.py only."""

from __future__ import annotations

LONG_TEXT = """\
The harbour at Saltmarsh Point was built twice. The first harbour, of oak piles and packed clay, \
was finished in the spring of 1807 and lasted until the great storm of the following winter, when \
the sea took the outer wall in a single night and left the inner one leaning like a tired man \
against a door. The people of the village, who had paid for it with eleven years of herring, did \
not complain. They met in the chapel on the Sunday after, counted what money there was, and sent \
for an engineer.

The engineer was a small, exact woman called Martha Venn, and she did not begin by building \
anything. She spent the whole of that year measuring. Every morning and every evening she walked \
out along the broken wall with a brass rule and a notebook, and wrote down how high the water \
stood, which way the wind came from, and how long the largest waves were from crest to crest. The \
children followed her at first, because she gave a penny to whoever could guess the height of the \
tide, and later because they had begun to guess it well. By midsummer a girl of nine could tell \
the height to within two inches from the sound of the water under the planks alone.

When the notebook was full, Venn drew a curve. It was a plain curve, the sort that any clerk could \
have drawn, but it showed what nobody in the village had seen: that the waves which did the damage \
were not the highest ones. The highest waves came from the north, rode in slowly, and broke far \
out on the bar, where they hurt nothing. The dangerous ones were shorter, came from the east about \
once in forty days, and arrived in groups of five or six, each finding the wall still wet and \
trembling from the one before. A wall did not fall because it was struck hard. It fell because it \
was struck again before it had come to rest.

So the second harbour was built to be slow to answer. Venn left gaps between the stones, filled \
them with loose shingle, and set the face of the wall at a slope so gentle that the old fishermen \
laughed at it and called it the beach. The water ran up, lost its strength among the stones, and \
ran back down through the shingle with a noise like breathing. It took four years to build and \
cost a third less than the first one, since most of the stone did not need to be cut. In the \
winter of 1814 there was a storm worse than any that the village remembered, and in the morning \
the wall had moved by the width of a hand, all of it together, and had settled there more firmly \
than before.

What remains of her work today is easy to miss. The wall is grown over with weed and the notebook \
is in a glass case in the county museum, open at a page of figures that few visitors read. But the \
method has outlived the stone. Before you decide how strong a thing must be, she wrote inside the \
cover, find out how often it is asked, and how long it has to rest.
"""

SYSTEM_CHAT = [
    {"role": "system", "content": "You are a patient teacher. Answer in two short sentences."},
    {"role": "user", "content": "Why does ice float on water?"},
]

TEXTS: dict[str, str] = {
    "english_fact": "The capital of France is",
    "english_story": "Once upon a time, in a small village by the sea, there lived",
    "english_explain": "Photosynthesis is the process by which plants",
    "chinese": "中国的首都是北京,它是一座",
    "code_python": 'def fibonacci(n):\n    """Return the n-th Fibonacci number."""\n',
    "code_c": "#include <stdio.h>\n\nint main(void) {\n    for (int i = 0; i < 10; i++) {\n",
    "emoji": "Happy birthday! 🎉🎂 I hope you have a wonderful day 😊",
    "list": "Three things to pack for a hike:\n1. Water\n2.",
    "numbers": "1, 2, 4, 8, 16, 32, 64, 128,",
    "one_token": "The",
}
