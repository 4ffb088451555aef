// Options can be looked for as they are written. The search takes a dash before a word for "without this word", so that
// "--exclude" would find all pages but the right ones: the dashes are taken away as they are typed.
document.addEventListener("input", (event) => {
  const field = event.target
  if (field.dataset?.mdComponent !== "search-query") return
  const words = field.value.replace(/(^|\s)-+(?=\w)/g, "$1")
  if (words !== field.value) field.value = words
})
