import pytest

from sgpo_jax.data.language import is_english


@pytest.mark.parametrize(
    "text",
    [
        "Find the number of positive integers $n$ for which $\\phi(n) = 12$.",
        "$\\cos 18^{\\circ} + \\cos 36^{\\circ} = $",
        "Simplify $\\sqrt{7\\cdot 2}$.",
        "In the country of Óxisz, Gastón and Zoë count the sum of properties of any two cities.",
        "Lines perpendicular to ℓ meet at α, and 𝑥 ∈ ℝ has the property that it is ℵ₀. Find it.",
        "\N{CYRILLIC CAPITAL LETTER A} Senior Center is hosting a bingo night, and $2,400 in prize money will be given "
        "away to the first winners of the night, and how many dollars will each of them receive?",
        "",
    ],
)
def test_english(text: str) -> None:
    assert is_english(text)


@pytest.mark.parametrize(
    "text",
    [
        "求 $x$",
        "$I=\\int_{0}^{1} \\frac{1}{1+(\\cos t)^{2}} d t$, 则 $[10 I]=$ $\\qquad$.",
        "设 $n=1990$, 则 $2^n=$? The original answer is in $-\\frac{m}{n}$ format, please give the value of m + n.",
        "求 $x+y$. The original answer is in the form $m/n$ where m and n are coprime positive integers, and you are "
        "asked to give the value of their sum, not the fraction itself. 谢谢",
        "则 find $" + "\\frac{\\sqrt{\\displaystyle x}}{y}" * 12 + "$",
        "Найдите сумму всех делителей числа 28.",
        "고양이는 몇 마리입니까?",
        "Trouvez tous les entiers positifs tels que leur somme soit égale au double du produit.",
        "Sea $ABC$ un triángulo con lados enteros cuyo perímetro vale veinte unidades exactas.",
        "Bestimme alle Primzahlen, deren Quersumme durch sieben teilbar ist und nicht mehr als drei Ziffern haben.",
    ],
)
def test_other_languages(text: str) -> None:
    assert not is_english(text)
