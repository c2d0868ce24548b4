"""Common English words, each of which most vocabularies hold as one token with the space before it."""

from __future__ import annotations

_TEXT = """
the of and to in is was he for it with as his on be at by had are but from or have an they which one you were all her
she there would their we him been has when who will no more if out so what up said about than into them can only other
time new some could these two may first then do any like my now over such our man me even most made after also well did
many before must years back through much where your way down should because long each just state people those how too
little good world make very year still see own work men day get here old life both between being under three never
know same last another while us off might great go come since against right came take used himself few house use place
during high without again home around small however found part school thought went say general once upon war every
left water system set head far better hand night yes public put church white days number until always point second
city course less room business early order face group took power hands better light end question best side almost line
name four young group human local social given fact area car family change country body want open hard child free
company door history result community interest need music paper real reason service table money age summer river
"""

COMMON_WORDS: tuple[str, ...] = tuple(dict.fromkeys(_TEXT.split()))
